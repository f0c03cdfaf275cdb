"""Each oracle tells when a pass does what it may not: planted bad passes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from fxpasses.effects import is_wait
from fxpasses.graph import Role, StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice
from fxpasses.testing.check import check_run
from fxpasses.testing.oracles import (
    ORACLES,
    OracleFailure,
    dump_reads_back,
    effects_survive,
    no_dead_code,
    sizes_vary,
)
from fxpasses.testing.oracles import rules as rule_oracles
from fxpasses.testing.oracles.base import run_pass
from fxpasses.testing.program import Layer, Program
from fxpasses.testing.sizes import number
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step

GRAPH = GradientGraph(
    (Leaf((2, 3)), Leaf((4,))),
    (Step("double", 0), Step("sin", 1)),
    gradients=(3, 4),
    saved=(Leaf((3,)),),
    input_gradients=(0,),
)
ENVIRONMENT = {
    "world": 3,
    "reduce": "mean",
    "reduce_dtype": None,
    "bucket_mb": 1.0,
    "group": "world",
    "layout": None,
}
_runs = itertools.count()


@dataclasses.dataclass(frozen=True)
class Bad(Pass):
    """A pass made of a function."""

    action: Callable[[TrainingGraph, Bad], Report | None] = lambda graph, current: None
    rank: int | None = from_environment("rank")

    name: ClassVar[str] = "bad"
    stage: ClassVar[str] = "backward"

    def run(self, graph: TrainingGraph) -> Report:
        return self.action(graph, self) or Report(changed=True)


@dataclasses.dataclass(frozen=True)
class BadReducer(Bad):
    name: ClassVar[str] = "bad_reducer"
    provides: ClassVar[frozenset[str]] = frozenset({"reduced"})
    preserves_numerics: ClassVar[bool] = False

    def error_bound(self) -> str:
        return "1e-5 * sum over ranks |g|"

    def tolerance(self, local: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return 1e-5 * local.abs().double().sum(0)


def new(
    graph: TrainingGraph, fn: Any, *nodes: Any, rule: str = "rule", parameters: tuple[str, ...] = ()
) -> Any:
    why = Provenance("bad", rule, parameters=parameters)
    return splice(graph, graph.output_node, fn, *nodes, name="new", provenance=why)


def map_gradients(graph: TrainingGraph, fn: Any) -> None:
    for gradient in graph.gradients():
        graph.set_output(gradient.index, new(graph, fn, gradient.node))


def scaled(graph, current):
    map_gradients(graph, lambda g: g * (1 + 1e-6))


def swapped(graph, current):
    first, second = graph.gradients()
    graph.set_outputs({first.index: second.node, second.index: first.node})


def cast(graph, current):
    map_gradients(graph, lambda g: g.double())


def dropped(graph, current):
    values = graph.output_node.args[0]
    graph.output_node.args = ((None, *values[1:]),)


def other_input_gradient(graph, current):
    ((index, node, _),) = graph.outputs("input_gradient")
    graph.set_output(index, new(graph, lambda x: x * 3, node))


def lies(graph, current):
    return Report(changed=True)


def hides(graph, current):
    map_gradients(graph, lambda g: g * 1)
    return Report(changed=False)


def counts_badly(graph, current):
    map_gradients(graph, lambda g: g * 1)
    return Report(changed=True, counts={"half": 0.5})


def by_chance(graph, current):
    for _ in range(next(_runs) % 2 + 1):
        map_gradients(graph, lambda g: g * 1)


def by_rank(graph, current):
    if current.rank == 1:
        launch_all(graph, waits=True)
        return Report(changed=True)
    return Report(changed=False)


def launch_all(graph: TrainingGraph, waits: bool, marked: bool = False) -> None:
    for gradient in graph.gradients():
        launch = new(
            graph, lambda g: torch.ops._c10d_functional.all_reduce(g, "max", "world"), gradient.node
        )
        if waits:
            new(graph, torch.ops._c10d_functional.wait_tensor, launch)


def never_waits(graph, current):
    launch_all(graph, waits=False)


def early_read(graph, current):
    (first, _) = graph.gradients()
    launch = new(
        graph, lambda g: torch.ops._c10d_functional.all_reduce(g, "sum", "world"), first.node
    )
    new(graph, torch.ops._c10d_functional.wait_tensor, launch)
    graph.set_output(first.index, launch)


def stateful(graph, current):
    spec = StateSpec("memory", "x", (2,), torch.float32, torch.device("cpu"))
    node = graph.add_state(spec)
    graph.write_state(spec.name, new(graph, lambda x: x.double(), node))


def misdeclared(graph, current):
    spec = StateSpec("memory", "x", (2,), torch.float32, torch.device("cpu"))
    graph.add_state(spec).meta["state"] = dataclasses.replace(spec, shape=(3,))


def wrong_fake(graph, current):
    gradient = graph.gradients()[0]
    node = new(graph, lambda g: g.t().contiguous().t(), gradient.node)
    node.meta["val"] = gradient.node.meta["val"]
    graph.set_output(gradient.index, node)


def wrong_fake_within(graph, current):
    gradient = graph.gradients()[0]
    node = new(graph, lambda g: g * 1, gradient.node)
    graph.set_output(gradient.index, new(graph, lambda g: g * 1, node))
    node.meta["val"] = node.meta["val"].to(torch.float64)


def aliased(graph, current):
    ((index, _, _),) = graph.outputs("input_gradient")
    (tangent, _), *_ = graph.inputs()
    copy = new(graph, lambda x: x.clone(), tangent)
    graph.set_output(index, copy)


def doubles(graph, current):
    count = sum(n.name.startswith("new") for n in graph.graph.nodes)
    map_gradients(graph, (lambda g: g * 1) if not count else (lambda g: g * 2))


def uses_undefined(graph, current):
    first, _ = graph.gradients()
    node = new(graph, lambda g: g * 1, first.node)
    graph.set_output(first.index, node)
    node.append(first.node)


def writes_input(graph, current):
    (tangent, _), *_ = graph.inputs()
    with graph.graph.inserting_before(graph.output_node):
        node = graph.graph.call_function(torch.ops.aten.mul_.Tensor, (tangent, 2))
    node.meta["val"] = tangent.meta["val"]


def drops_effect(graph, current):
    map_gradients(graph, lambda g: g * 1)


def reduce_with(
    operation: str, scale: float, times: int = 1, marked: bool = True, named: bool = True
) -> Any:
    def action(graph: TrainingGraph, current: Pass) -> None:
        for gradient in graph.gradients():
            node = gradient.node
            for _ in range(times):
                origin = Provenance(
                    current.name, "launch", parameters=(gradient.parameter,) if named else ()
                )
                launch = splice(
                    graph,
                    graph.output_node,
                    lambda g: torch.ops._c10d_functional.all_reduce(g / scale, operation, "world"),
                    node,
                    name="new",
                    provenance=origin,
                )
                launch.meta["reduces"] = marked
                node = new(graph, torch.ops._c10d_functional.wait_tensor, launch)
            graph.set_output(gradient.index, node)

    return action


PLANTED = {
    "results_right": scaled,
    "signature_kept swapped": swapped,
    "signature_kept dtype": cast,
    "signature_kept dropped": dropped,
    "results_right input gradient": other_input_gradient,
    "report_honest lies": lies,
    "report_honest hides": hides,
    "report_honest counts": counts_badly,
    "same_on_all_ranks collectives": by_rank,
    "rules_hold/waited_once never": never_waits,
    "rules_hold/waited_once early": early_read,
    "rules_hold/state_keeps_its_form": stateful,
    "state_sound": misdeclared,
    "fakes_true": wrong_fake,
    "fakes_true within": wrong_fake_within,
    "memory_kept": aliased,
    "idempotent": doubles,
    "rules_hold/defined_before_use": uses_undefined,
    "rules_hold/functional": writes_input,
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_bad_pass_is_found(case):
    oracle = case.split()[0]
    with pytest.raises(OracleFailure, match=rf"oracle '{oracle}': pass 'bad"):
        check_run(Bad(PLANTED[case]), GRAPH, ENVIRONMENT)


REDUCERS = {
    "rules_hold/reduced_once twice": reduce_with("sum", 3.0, times=2),
    "rules_hold/reduced_once never": reduce_with("sum", 3.0, times=0),
    "rules_hold/reduced_once unmarked": reduce_with("sum", 3.0, marked=False),
    "collectives_explained": reduce_with("sum", 3.0, named=False),
    "results_right scale": reduce_with("sum", 1.0),
    "results_right operation": reduce_with("max", 1.0),
    "results_right avg": reduce_with("avg", 3.0),
}


@pytest.mark.parametrize("case", REDUCERS)
def test_a_bad_reduction_is_found(case):
    oracle = case.split()[0]
    with pytest.raises(OracleFailure, match=rf"oracle '{oracle}'"):
        check_run(BadReducer(REDUCERS[case]), GRAPH, ENVIRONMENT)


@pytest.mark.parametrize("action", [reduce_with("sum", 3.0), reduce_with("avg", 1.0)])
def test_a_right_reduction_passes_all_but_a_second_run(action):
    oracles = [oracle for oracle in ORACLES if oracle.__name__ != "idempotent"]
    check_run(BadReducer(action), GRAPH, ENVIRONMENT, oracles=oracles)


def test_a_pass_that_differs_from_run_to_run_is_found():
    run = run_pass([Bad(by_chance)] * 2, GRAPH.build())
    with pytest.raises(OracleFailure, match="same_on_all_ranks"):
        rule_oracles.same_on_all_ranks(run)


def test_a_pass_that_drops_a_collective_is_found():
    graph = GRAPH.build()
    launch_all(graph, waits=True)

    def drop(graph, current):
        for node in reversed(list(graph.walk())):
            if node.target is torch.ops._c10d_functional.wait_tensor.default:
                launch = node.args[0]
                graph.graph.erase_node(node)
                graph.graph.erase_node(launch)

    run = run_pass([Bad(drop)] * 2, graph)
    with pytest.raises(OracleFailure, match="rules_hold/effects.*'new_all_reduce' was removed"):
        rule_oracles.rules_hold(run)
    with pytest.raises(OracleFailure, match="effects_survive"):
        effects_survive(run)


def test_a_pass_that_swaps_waits_is_found():
    graph = GRAPH.build()
    launch_all(graph, waits=True)

    def swap(graph, current):
        first, second = (n for n in graph.walk() if is_wait(n))
        second.append(first)

    class Reordering(Bad):
        reorders: ClassVar[bool] = True

    with pytest.raises(
        OracleFailure, match="rules_hold/effects.*'new_wait_tensor' was removed, or"
    ):
        rule_oracles.rules_hold(run_pass([Bad(swap)], graph))
    rule_oracles.rules_hold(run_pass([Reordering(swap)], graph))


def test_what_a_pass_leaves_behind_is_found():
    def leaves(graph, current):
        map_gradients(graph, lambda g: (g * 1, g * 2)[0])
        new(graph, lambda g: g * 3, graph.gradients()[0].node)

    with pytest.raises(OracleFailure, match="no_dead_code"):
        no_dead_code(run_pass([Bad(leaves)], GRAPH.build()))


def test_what_a_pass_makes_of_dead_code_is_no_fault_of_it():
    graph = GRAPH.build()
    new(graph, lambda g: g * 3, graph.gradients()[0].node)

    def replace(graph, current):
        for node in list(graph.walk()):
            if node.target is torch.ops.aten.mul.Tensor:
                with graph.graph.inserting_before(node):
                    add = graph.graph.call_function(torch.ops.aten.add.Tensor, (node.args[0],) * 2)
                add.meta.update(node.meta)
                node.replace_all_uses_with(add)
                graph.graph.erase_node(node)

    run = run_pass([Bad(replace)], graph)
    assert len(run.lean_after.graph.nodes) == len(run.after.graph.nodes) - 1
    no_dead_code(run)


DYNAMIC = Program((Layer("linear", 3), Layer("relu")), batch=3, dynamic=True)


def reshaped(graph: TrainingGraph, rewrite: Callable[[fx.Node, list[Any]], fx.Node]) -> None:
    """Give the input gradient the sizes that it had when it was traced."""
    index, node = next(
        (at, n)
        for at, n, role in graph.outputs()
        if role.kind == "input_gradient" and n is not None
    )
    graph.set_output(index, rewrite(node, list(node.meta["val"].shape)))


def traced_anew(graph, current):
    def rewrite(node, shape):
        fixed = [int(size) for size in shape]
        return new(graph, lambda x: x.reshape(fixed), node)

    reshaped(graph, rewrite)


def not_traced(graph, current):
    def rewrite(node, shape):
        fixed = [number(size) for size in shape]
        with graph.graph.inserting_before(graph.output_node):
            made = graph.graph.call_function(torch.ops.aten.view.default, (node, fixed))
        made.meta.update(val=node.meta["val"])
        return made

    reshaped(graph, rewrite)


def test_state_of_a_forward_has_to_be_named():
    @dataclasses.dataclass(frozen=True)
    class Remembers(Bad):
        stage: ClassVar[str] = "joint"

        def run(self, graph):
            (spec,) = Names.forward_states(self, torch.device("cpu"))
            graph.write_state(spec.name, new(graph, lambda x: x + 1, graph.add_state(spec)))
            return Report(changed=True)

    class Names(Remembers):
        def forward_states(self, device):
            return (StateSpec("memory", "x", (2,), torch.float32, device),)

    with pytest.raises(OracleFailure, match="state_sound.*'memory/x', not in `forward_states`"):
        check_run(Remembers(), GRAPH, ENVIRONMENT, oracles=[rule_oracles.state_sound])
    check_run(Names(), GRAPH, ENVIRONMENT, oracles=[rule_oracles.state_sound])


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (traced_anew, r"what varied is fixed now: .* \(with s\d+ = 4\)"),
        (not_traced, "does not run"),
    ],
)
def test_sizes_that_a_pass_burns_in_are_found(action, said):
    source = dataclasses.replace(DYNAMIC, grad_input=True)
    for _ in range(2):  # what the first run did to what is known of sizes is forgotten
        with pytest.raises(OracleFailure, match=f"oracle 'sizes_vary'.*{said}"):
            check_run(Bad(action), source, ENVIRONMENT, oracles=[sizes_vary])


def test_results_are_right_with_other_sizes():
    def scaled(graph, current):
        size = next(n for n, _ in graph.inputs() if isinstance(n.meta["val"], torch.SymInt))
        hint = size.meta["val"].node.hint
        map_gradients(graph, lambda g, s: g * (s == hint), size)

    def map_gradients(graph, fn, size):
        for gradient in graph.gradients():
            graph.set_output(gradient.index, new(graph, fn, gradient.node, size))

    with pytest.raises(OracleFailure, match=r"(?s)results_right.*\(with s\d+ = 4\)"):
        check_run(Bad(scaled), DYNAMIC, ENVIRONMENT, oracles=[sizes_vary])
    run = check_run(Bad(lies), DYNAMIC, ENVIRONMENT, oracles=[sizes_vary])
    assert list(run.other_sizes.values()) == [4]
    assert not check_run(Bad(lies), GRAPH, ENVIRONMENT, oracles=[sizes_vary]).other_sizes


def test_a_dump_that_says_something_else_is_found(monkeypatch):
    from fxpasses.testing.oracles import kept as structure

    run = run_pass([Bad(lambda graph, current: Report(changed=False))], GRAPH.build())
    text = structure.dumped(run)
    dump_reads_back(run)
    for old, wrong in (
        ("mul.Tensor", "add.Tensor"),
        (", 2)", ", 3)"),
        ("input tangents_0: ", "in "),
    ):
        assert old in text
        monkeypatch.setattr(structure, "dumped", lambda run, o=old, w=wrong: text.replace(o, w))
        with pytest.raises(OracleFailure, match="dump_reads_back"):
            dump_reads_back(run)


def test_an_order_that_matters_is_found():
    from fxpasses.testing.oracles import orders_agree

    @dataclasses.dataclass(frozen=True)
    class Other(Bad):
        name: ClassVar[str] = "other"

    def plus(graph, current):
        map_gradients(graph, lambda g: g + 1)

    def times(graph, current):
        map_gradients(graph, lambda g: g * 2)

    with pytest.raises(OracleFailure, match="orders_agree"):
        orders_agree([Bad(plus), Other(times)], GRAPH.build(), 2)
    assert orders_agree([Bad(times), Other(times)], GRAPH.build(), 2) == 2


def test_messages_name_the_node_and_the_role():
    with pytest.raises(
        OracleFailure, match=r"node 'new_mul': output 0 \(gradient 'layer0.weight'\) on rank 0 of 3"
    ):
        check_run(Bad(scaled), GRAPH, ENVIRONMENT)


def test_roles_that_are_unknown_are_found():
    def role(graph, current):
        graph.add_output(graph.gradients()[0].node, Role("nonsense", "x"))

    with pytest.raises(OracleFailure, match="has_roles"):
        check_run(Bad(role), GRAPH, ENVIRONMENT)


def test_what_torch_says_wrongly_of_strides_is_no_fault_of_a_pass():
    turned = Leaf((2, 2), layout="transposed")
    spec = GradientGraph((Leaf(()),), (Step("norm", 1),), (-1,), saved=(turned,))
    run = run_pass([Bad(lambda graph, current: Report(changed=False))], spec.build())
    said = run.before.gradients()[0].node.meta["val"].stride()
    assert said != run.traced_before.results[0][0].stride(), (
        "torch is right now: drop the exception"
    )
    rule_oracles.fakes_true(run)
