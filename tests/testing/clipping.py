"""`clip_norm` on graphs that nobody wrote by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.effects import is_launch
from fxpasses.graph import LIMIT_STATE, NORM_STATE, Gradient, StateSpec, TrainingGraph
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.clip_norm import ClipNorm
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.rewrite import Provenance, origin_of, splice
from fxpasses.spec import check as check_rules
from fxpasses.testing.check import run_over, settings
from fxpasses.testing.oracles import Run, run_pass
from fxpasses.testing.strategies import SEEDS, environments, gradient_graphs
from fxpasses.testing.synthetic import GradientGraph, Leaf
from fxpasses.testing.values import random_inputs
from fxpasses.testing.world import run_world

CPU = torch.device("cpu")
WIDE = {True: torch.complex128, False: torch.float64}


@dataclasses.dataclass(frozen=True)
class Behind(ClipNorm):
    """It may stand alone where there is one rank; here it stands behind a reduction."""

    requires: ClassVar[frozenset[str]] = frozenset({"reduced"})


def nothing_new_is_sent(run: Run) -> None:
    """What was sent before is sent, in that order, and nothing else."""
    assert [n.name for n in run.after.walk() if is_launch(n)] == [
        n.name for n in run.before.walk() if is_launch(n)
    ]


def clipped_as_promised(run: Run) -> None:
    """Each gradient is multiplied by min(1, limit / (norm + 1e-6)) of the norm of all; the norm is written, and
    nothing is sent.
    """
    graph, before = run.after, run.before
    gradients = [g for g in before.gradients() if g.node.meta["val"].numel()]
    if not gradients:
        assert not run.reports[0].changed
        return
    nothing_new_is_sent(run)
    specs = {node.meta["state"] for node, _ in graph.inputs("state")}
    limit_spec = StateSpec(LIMIT_STATE, "", (), torch.float32, CPU, 1.0)
    assert {limit_spec, StateSpec(NORM_STATE, "", (), torch.float32, CPU)} <= specs
    (at,) = [i for i, _, role in graph.outputs("state") if role.name == f"{NORM_STATE}/"]
    for rank in range(run.world):
        old, new = run.traced_before.results[rank], run.traced_after.results[rank]
        values = zip(graph.inputs(), random_inputs(graph, run.seed * 97 + rank), strict=True)
        (limit,) = [v.item() for (_, role), v in values if role.name == f"{LIMIT_STATE}/"]
        wide = {g.index: old[g.index].to(WIDE[old[g.index].is_complex()]) for g in gradients}
        norm = sum(value.abs().square().sum() for value in wide.values()).sqrt()
        if not norm.float().isfinite():
            assert all(not new[index].isfinite().any() for index in wide)
            continue
        torch.testing.assert_close(new[at].double(), norm, rtol=1e-4, atol=1e-30)
        factor = min(max(limit / (norm.item() + 1e-6), 0.0), 1.0)
        for index, value in wide.items():
            eps = torch.finfo(new[index].dtype).eps
            found = new[index].to(value.dtype)
            torch.testing.assert_close(found, value * factor, rtol=max(1e-4, 2 * eps), atol=1e-7)
            if (
                eps < 1e-10 and value.any()
            ):  # whatever the factor is, it is one: nothing is rounded on the way
                most = value.abs().argmax()
                same = value * (found.flatten()[most] / value.flatten()[most])
                torch.testing.assert_close(found, same, rtol=1e-12, atol=0.0)


def clipping_by_bucket(examples: int) -> None:
    """A reduced bucket is measured and multiplied once, as a whole, where its views are what leaves the graph;
    where something else is made of one of them, each gradient by itself.
    """

    @settings(examples)
    @given(
        gradient_graphs(),
        environments(5),
        SEEDS,
        st.sets(st.integers(0, 4), max_size=2),
        st.sampled_from(("any", "fixed")),
    )
    def search(
        source: GradientGraph,
        environment: dict[str, Any],
        seed: int,
        changed: set[int],
        order: str,
    ) -> None:
        graph = source.build()
        for current in (Bucketing(), GradientSync(order=order)):
            current.bind({**environment, "rank": 0}).run(graph)
        buckets = [n.meta["reduced_bucket"] for n in graph.walk() if "reduced_bucket" in n.meta]
        own = [g for g in graph.gradients() if g.node.meta["val"].numel()]
        made = [g for i, g in enumerate(own) if i in changed]
        _replace(graph, made)
        others = {gradient.parameter for gradient in made}
        whole = {frozenset(b.parameters) for b in buckets if not others & set(b.parameters)}
        single = {frozenset({g.parameter}) for g in own if g.parameter not in set().union(*whole)}
        bound = ClipNorm(max_norm=1.0, world=environment["world"])
        run = run_pass([bound] * environment["world"], graph, frozenset({"reduced"}), seed)
        check_rules(run.after, "clip_norm")
        clipped_as_promised(run)
        products = [n for n in run.after.walk() if origin_of(n).rule == "multiply"]
        parts = {frozenset(n.meta["provenance"].parameters) for n in products}
        assert parts == whole | single, f"multiplies {parts}, expected {whole} and {single}"
        if own:
            assert run.reports[0].counts == {"norms": len(parts), "gradients": len(own)}
        for node in products:  # so that no compiler rounds the factor to a gradient's dtype
            value = node.meta["val"]
            made = node.target is torch.ops.aten.mul.Tensor
            assert not made or value.dtype.itemsize >= 4, f"{node.name} multiplies {value.dtype}"
        delivered = {n.meta["reduced_bucket"] for n in products if "reduced_bucket" in n.meta}
        assert {frozenset(b.parameters) for b in delivered} == whole, "a whole bucket is one still"

    search()


def _replace(graph: TrainingGraph, gradients: list[Gradient]) -> None:
    """Put squares in place of gradients; where two of them have one form, the first one's in place of both.
    Then as many elements leave the graph as are computed, but not the same ones.
    """

    def squares(values: list[torch.Tensor]) -> list[torch.Tensor]:
        if len({(v.shape, v.dtype) for v in values}) < len(values):
            both = torch.stack([v.square() for v in values])
            return [both[0], both[0]]
        return [v.square() for v in values]

    origin = Provenance("test", "square")
    nodes = [gradient.node for gradient in gradients]
    new = splice(graph, graph.output_node, squares, nodes, name="square", provenance=origin)
    graph.set_outputs({g.index: node for g, node in zip(gradients, new, strict=True)})


def as_torch_clips(examples: int) -> None:
    """The result is that of `torch.nn.utils.clip_grad_norm_`, for norms of every size."""
    values = st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=4)
    sizes = st.integers(-9, 9).map(lambda n: 10.0**n)

    @settings(examples)
    @given(st.lists(values, min_size=1, max_size=3), sizes, sizes)
    def search(rows: list[list[float]], size: float, limit: float) -> None:
        leaves = tuple(Leaf((len(row),)) for row in rows)
        graph = GradientGraph(leaves, gradients=tuple(range(len(rows)))).build()
        ClipNorm(max_norm=limit, world=1).run(graph)
        gradients = [size * torch.tensor(row) for row in rows]
        fills = [torch.tensor(n.meta["state"].fill) for n, _ in graph.inputs("state")]
        (found,) = run_world(graph, [[*gradients, *fills]])
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        for parameter, value in zip(parameters, found, strict=False):
            torch.testing.assert_close(value, parameter.grad, rtol=1e-5, atol=1e-30)
        (at,) = [i for i, _, role in graph.outputs("state") if role.name == f"{NORM_STATE}/"]
        torch.testing.assert_close(found[at], norm, rtol=1e-5, atol=1e-30)

    search()


def what_is_not_finite() -> None:
    """An infinite norm, of finite gradients or not, makes all gradients NaN: nobody steps on zeros."""
    graph = GradientGraph((Leaf((2,)), Leaf((1,))), gradients=(0, 1)).build()
    options = {"world": 1, "reduce": "mean", "bucket_mb": 1.0, "group": "world", "layout": None}
    run = run_over(Behind(max_norm=1.0), graph, options)
    for large in (math.inf, math.nan, 3e38):
        states = [torch.zeros(n.meta["val"].shape) for n, _ in run.after.inputs("state")]
        limit = [r.name for _, r in run.after.inputs("state")].index(f"{LIMIT_STATE}/")
        states[limit].fill_(1.0)
        inputs = [torch.tensor([large, 1.0]), torch.ones(1), *states]
        ((first, second, *_),) = run_world(run.after, [inputs])
        assert bool(first.isnan().all()) and bool(second.isnan().all())
