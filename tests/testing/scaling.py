"""What `loss_scale` and `overflow` promise, beside what holds of every pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from torch import fx

from fxpasses.graph import OVERFLOW_STATE, SCALE_STATE, Role, StateSpec, TrainingGraph, ancestors
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.loss_scale import LossScaling
from fxpasses.passes.overflow import Overflow
from fxpasses.pipeline import Pipeline
from fxpasses.rewrite import Provenance
from fxpasses.testing.check import check_run, settings
from fxpasses.testing.oracles import ORACLES, Run
from fxpasses.testing.oracles.base import run_pass
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.strategies import SEEDS, environments, gradient_graphs
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from fxpasses.testing.values import inputs_of_ranks, random_inputs
from fxpasses.testing.world import run_world

CPU = torch.device("cpu")
INFINITY, NOT_A_NUMBER = float("inf"), float("nan")


def inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def new_nodes(run: Run) -> list[fx.Node]:
    known = {n.name for n in run.before.graph.nodes}
    return [n for n in run.after.walk() if n.name not in known]


# Loss scale


def scaled_as_promised(run: Run) -> None:
    """Results are, bitwise, those of the graph as it was, on tangents that somebody scaled before, of which
    somebody unscales each gradient that is made of tangents.
    """
    graph = run.after
    assert isinstance(run.current, LossScaling)
    leaving = _reached(run.before)
    if not run.current.scale or not leaving:
        assert not run.reports[0].changed and not run.reports[0].counts
        return
    needed = ancestors(leaving.values())
    tangents = [n for n, _ in run.before.inputs("tangent") if n in needed]
    assert run.reports[0].counts == {"tangents": len(tangents), "gradients": len(leaving)}
    _scale_is_declared(run)
    _multiplied_once(run, tangents, leaving)
    for rank, row in enumerate(run.traced_after.results):
        given = random_inputs(graph, run.seed * 97 + rank)
        scale: Any = run.current.scale
        if scale == "dynamic":
            scale = given.pop()
        expected = _OnScaled(run.before.module, scale).run(*given)
        for at, value in enumerate(expected):
            value = _unscaled(value, scale) if at in leaving else value
            assert bitwise(row[at], value), f"output {at}: {row[at]}, expected {value}"


class _OnScaled(fx.Interpreter):
    """Runs a graph with all that reads a tangent reading its multiple: casts before it is rounded."""

    def __init__(self, module: fx.GraphModule, scale: Any) -> None:
        super().__init__(module)
        self._scale = scale

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        kept = dict(self.env)
        for tangent in n.all_input_nodes:
            if tangent.op == "placeholder" and tangent.meta["role"].kind == "tangent":
                value = kept[tangent]
                product = _wide(value) * self._scale
                is_cast = n.target is torch.ops.aten._to_copy.default
                self.env[tangent] = product if is_cast else product.to(value.dtype)
        result = super().run_node(n)
        self.env = kept
        return result


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _unscaled(value: torch.Tensor, scale: Any) -> torch.Tensor:
    reciprocal: Any = 1 / scale
    if isinstance(scale, torch.Tensor):  # 0-dim: it does not widen what it multiplies
        reciprocal = torch.tensor(1 / scale.item(), dtype=torch.float32)
    return (_wide(value) * reciprocal).to(value.dtype)


def _reached(graph: TrainingGraph) -> dict[int, fx.Node]:
    """The gradients that depend on a tangent, by index."""
    tangents = {n for n, _ in graph.inputs("tangent")}
    outputs = graph.outputs("gradient") + graph.outputs("input_gradient")
    made = [(at, n) for at, n, _ in outputs if n is not None and n.op != "placeholder"]
    return {at: n for at, n in made if ancestors([n]) & tangents}


def _scale_is_declared(run: Run) -> None:
    states = [n.meta["state"] for n, role in run.after.inputs("state")]
    declared = StateSpec(SCALE_STATE, "", (), torch.float32, CPU)
    assert states == ([declared] if run.current.scale == "dynamic" else [])  # type: ignore[attr-defined]
    assert not run.after.outputs("state"), "the graph only reads the scale"


def _multiplied_once(run: Run, tangents: list[fx.Node], leaving: dict[int, fx.Node]) -> None:
    """As few multiplications as that takes: in front of everything, and right behind each gradient."""
    rules: dict[str, set[str]] = {"scale": set(), "unscale": set(), "reciprocal": set()}
    for node in new_nodes(run):
        rules[node.meta["provenance"].rule].add(node.meta["provenance"].source)
    assert rules["scale"] == {n.name for n in tangents}
    assert len(rules["unscale"]) == len(set(leaving.values()))
    products = [n for n in new_nodes(run) if "mul" in str(n.target)]
    assert len(products) == len(rules["scale"]) + len(rules["unscale"])
    order = [n.name for n in run.after.graph.nodes]
    own = {n.name for n in run.before.walk()}
    behind = {n.name: n.next.name for n in run.after.graph.nodes if n.op != "placeholder"}
    for node in products:
        at, origin = order.index(node.name), node.meta["provenance"]
        if origin.rule == "scale":
            assert not own & set(order[:at]), f"{node.name!r} stands behind a computation"
        else:
            assert "unscaled" in behind[origin.source], f"{origin.source!r} is unscaled elsewhere"


def complex_gradients_are_unscaled() -> None:
    """A complex parameter of a real loss: they left the graph scaled."""
    spec = GradientGraph((Leaf((2,)),), (Step("complex64"),), (1,), input_gradients=(1,))
    for scale in (1024.0, "dynamic"):
        run = run_pass([LossScaling(scale)], spec.build())
        scaled_as_promised(run)
        assert run.reports[0].counts == {"tangents": 1, "gradients": 2}


def constant_gradients_are_left_alone() -> None:
    """A gradient that does not depend on the loss was divided by its scale."""
    spec = GradientGraph((Leaf((2,)),), (Step("double"),), (2, 1), saved=(Leaf((2,)),))
    run = run_pass([LossScaling(1024.0)], spec.build())
    scaled_as_promised(run)
    inputs = [torch.full((2,), 3.0), torch.full((2,), 5.0)]
    ((gradient, constant),) = run_world(run.after, [inputs])
    assert gradient.tolist() == [6.0, 6.0] and constant.tolist() == [5.0, 5.0]


def low_tangents_that_are_cast() -> None:
    """A half-precision tangent that is cast first of all: it was cast down and up again, which is no valid
    graph.
    """
    steps = (Step("float32"), Step("double"))
    for kind, gradients in (("bfloat16", (1,)), ("bfloat16", (1, 2)), ("float16", (2, 1))):
        spec = GradientGraph((Leaf((2,), kind),), steps[: len(gradients)], gradients)
        check_run(LossScaling(3.0), spec, {"world": 1}, oracles=(*ORACLES, scaled_as_promised))


def overlapping_tangents() -> None:
    """Their multiples are dense, and views of those have other strides."""
    leaf = Leaf((2, 3), layout="expanded")
    spec = GradientGraph((leaf,), (Step("neg"), Step("transpose")), (0,), input_gradients=(2,))
    check_run(LossScaling(256.0), spec, {"world": 1}, oracles=(*ORACLES, scaled_as_promised))


def whole_steps_are_refused() -> None:
    """A graph that calls `backward()` itself has no tangent to scale."""
    spec = GradientGraph((Leaf((2,)),), gradients=(0,))
    graph = spec.build()
    graph.inputs()[0][0].meta["role"] = Role("input", "x")
    try:
        LossScaling(2.0).run(graph)
    except ValueError as error:
        assert "option 'loss_scale'" in str(error)
    else:
        raise AssertionError("a loss that nobody can scale went through")
    assert not LossScaling(0.0).run(graph).changed


# Overflow


def overflow_as_promised(run: Run) -> None:
    """The flag stays, and is set by a gradient that is not finite, whichever input it comes from."""
    assert isinstance(run.current, Overflow)
    found = {g.node.name for g in run.before.gradients() if inexact(g.node.meta["val"])}
    empty = {g.node.name for g in run.before.gradients() if not g.node.meta["val"].numel()}
    assert run.reports[0].changed == bool(found - empty)
    if not run.reports[0].changed:
        return
    assert run.reports[0].counts == {"checked": len(found - empty)}
    _flag_is_declared(run.after)
    _flagged_right([run.after], run.seed, 1.0)
    _flagged_right([run.after], run.seed, 0.0)
    position, poison = run.seed % len(run.before.inputs()), (INFINITY, NOT_A_NUMBER)[run.seed % 2]
    _flagged_right([run.after], run.seed, 0.0, position, poison)


def _flag_is_declared(graph: TrainingGraph) -> None:
    ((node, role),) = graph.inputs("state")
    assert node.meta["state"] == StateSpec(OVERFLOW_STATE, "", (), torch.float32, CPU)
    ((_, flag, written),) = graph.outputs("state")
    assert written == role and flag.next is graph.output_node, "the check does not stand last"
    assert flag.meta["provenance"] == Provenance("overflow", "check")


def _flagged_right(
    graphs: list[TrainingGraph],
    seed: int,
    flag: float,
    poisoned: int | None = None,
    poison: float = INFINITY,
) -> None:
    """Where the last rank has one element of one input that is not finite, if any."""
    rows = inputs_of_ranks(graphs, seed)
    if poisoned is not None and inexact(rows[-1][poisoned]) and rows[-1][poisoned].numel():
        rows[-1][poisoned].as_strided((1,), (1,)).fill_(poison)
    for row in rows:
        row[-1] = torch.tensor(flag)
    for graph, results in zip(graphs, run_world(graphs, rows), strict=True):
        gradients = [results[gradient.index] for gradient in graph.gradients()]
        bad = any(inexact(g) and not g.isfinite().all() for g in gradients)
        ((at, _, _),) = graph.outputs("state")
        assert results[at].item() == float(bad or flag), f"{results[at]} for {gradients}"


def overflow_of_buckets(examples: int) -> None:
    """Behind buckets: one check each, and what one rank can't represent all ranks notice."""

    @settings(examples)
    @given(gradient_graphs(), environments(1), SEEDS)
    def search(source: GradientGraph, environment: dict[str, Any], seed: int) -> None:
        graphs = [source.build(), source.build()]
        if not any(g.node.meta["val"].numel() for g in graphs[0].gradients()):
            return
        bound = {**environment, "world": 2}
        passes = tuple(p.bind(bound) for p in (Bucketing(), GradientSync(), Overflow()))
        for graph in graphs:
            buckets, _, check = Pipeline(passes).run("backward", graph)
            assert check.report.counts == {"checked": buckets.report.counts["buckets"]}
            _flag_is_declared(graph)
        _flagged_right(graphs, seed, 0.0)
        _flagged_right(graphs, seed, 0.0, poisoned=seed % len(source.build().inputs()))

    search()


def complex_overflow_is_noticed() -> None:
    """A complex gradient was not looked at."""
    spec = GradientGraph((Leaf((2,)),), (Step("complex64"),), (1,))
    check_run(Overflow(), spec, {"world": 1}, oracles=(*ORACLES, overflow_as_promised))


def what_stands_behind_a_bucket_is_noticed() -> None:
    """A pass behind the reduction may make a gradient that is not finite of a bucket that is."""
    graph = GradientGraph((Leaf((2,)),), gradients=(0,)).build()
    Bucketing(mb=1.0).run(graph)
    GradientSync(reduce="sum", group="world", world=1).run(graph)
    (gradient,) = graph.gradients()
    with graph.graph.inserting_before(graph.output_node):
        node = graph.graph.call_function(torch.ops.aten.reciprocal.default, (gradient.node,))
    node.meta["val"] = gradient.node.meta["val"]
    graph.set_output(gradient.index, node)
    Overflow().run(graph)
    ((_, flag),) = run_world(graph, [[torch.tensor([0.0, 1.0]), torch.tensor(0.0)]])
    assert flag.item() == 1.0


SINGLE: tuple[Callable[[], None], ...] = (
    complex_gradients_are_unscaled,
    constant_gradients_are_left_alone,
    low_tangents_that_are_cast,
    overlapping_tangents,
    whole_steps_are_refused,
    complex_overflow_is_noticed,
    what_stands_behind_a_bucket_is_noticed,
)
