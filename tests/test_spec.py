"""The rules: for each, graphs that break it, and the message that names pass, rule and node."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from fxpasses import spec
from fxpasses.graph import PENDING_STATE, Role, StateSpec, TrainingGraph
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.spec import SpecError
from fxpasses.testing import capture
from tests.graphs import (
    ANY_ORIGIN,
    C10D,
    WORLD,
    Does,
    Zoo,
    add_call,
    backward_of,
    checked,
    doubled,
    nodes_with,
    traced,
)

aten = torch.ops.aten
CPU = torch.device("cpu")
Breaker = Callable[[TrainingGraph, str], fx.Node]


def tangent_of(graph: TrainingGraph) -> fx.Node:
    return graph.inputs("tangent")[0][0]


def launch_of(graph: TrainingGraph, group: str) -> fx.Node:
    return add_call(graph, C10D.all_reduce.default, tangent_of(graph), "sum", group)


# One function a way to break a rule: each breaks it and returns the node to blame.


def use_before_definition(graph: TrainingGraph, group: str) -> fx.Node:
    node = next(graph.walk())
    negative = add_call(graph, aten.neg.default, node)
    node.prepend(negative)
    return negative


def computes_among_inputs(graph: TrainingGraph, group: str) -> fx.Node:
    node = tangent_of(graph)
    node.prepend(add_call(graph, aten.full.default, [2], 1.0))
    return node


def no_value(graph: TrainingGraph, group: str) -> fx.Node:
    node = add_call(graph, aten.neg.default, tangent_of(graph))
    add_call(graph, aten.abs.default, node)
    del node.meta["val"]
    return node


def part_of_another_dtype(graph: TrainingGraph, group: str) -> fx.Node:
    halves = add_call(graph, aten.split.Tensor, tangent_of(graph), 2)
    part = add_call(graph, operator.getitem, halves, 0)
    add_call(graph, aten.neg.default, part)
    part.meta["val"] = part.meta["val"].to(torch.bfloat16)
    return part


def input_without_value(graph: TrainingGraph, group: str) -> fx.Node:
    del tangent_of(graph).meta["val"]
    return graph.inputs()[0][0]


def input_without_role(graph: TrainingGraph, group: str) -> fx.Node:
    node = tangent_of(graph)
    del node.meta["role"]
    return node


def unknown_input_kind(graph: TrainingGraph, group: str) -> fx.Node:
    node = tangent_of(graph)
    node.meta["role"] = Role("gradient", "p0")
    return node


def unknown_output_kind(graph: TrainingGraph, group: str) -> fx.Node:
    graph.output_node.meta["roles"] = (Role("tangent", "p0"),)
    return graph.output_node


def too_few_roles(graph: TrainingGraph, group: str) -> fx.Node:
    graph.output_node.args = ((*graph.output_node.args[0], tangent_of(graph)),)
    return graph.output_node


def no_roles(graph: TrainingGraph, group: str) -> fx.Node:
    del graph.output_node.meta["roles"]
    return graph.output_node


def never_awaited(graph: TrainingGraph, group: str) -> fx.Node:
    return launch_of(graph, group)


def awaited_twice(graph: TrainingGraph, group: str) -> fx.Node:
    launch = launch_of(graph, group)
    for _ in range(2):
        add_call(graph, C10D.wait_tensor.default, launch)
    return launch


def read_in_flight(graph: TrainingGraph, group: str) -> fx.Node:
    launch = launch_of(graph, group)
    add_call(graph, C10D.wait_tensor.default, launch)
    return add_call(graph, aten.neg.default, launch)


def returned_in_flight(graph: TrainingGraph, group: str) -> fx.Node:
    launch = launch_of(graph, group)
    add_call(graph, C10D.wait_tensor.default, launch)
    graph.set_output(0, launch)
    return graph.output_node


def write_in_place(graph: TrainingGraph, group: str) -> fx.Node:
    return add_call(graph, aten.neg_.default, graph.gradients()[0].node)


def copy_to_intermediate(graph: TrainingGraph, group: str) -> fx.Node:
    return add_call(graph, aten.copy_.default, graph.gradients()[0].node, tangent_of(graph))


def add_state(graph: TrainingGraph, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    state = StateSpec("residual", "p0", shape, dtype, CPU)
    graph.add_state(state)
    return state.name


def unknown_state(graph: TrainingGraph, group: str) -> fx.Node:
    node = graph.gradients()[0].node
    graph.write_state("residual/p0", node)
    return node


def state_of_other_shape(graph: TrainingGraph, group: str) -> fx.Node:
    graph.write_state(add_state(graph, (4,), torch.float32), tangent_of(graph))
    return tangent_of(graph)


def state_of_other_dtype(graph: TrainingGraph, group: str) -> fx.Node:
    graph.write_state(add_state(graph, (3,), torch.float64), tangent_of(graph))
    return tangent_of(graph)


def state_written_twice(graph: TrainingGraph, group: str) -> fx.Node:
    name = add_state(graph, (3,), torch.float32)
    for _ in range(2):
        graph.add_output(tangent_of(graph), Role("state", name))
    return tangent_of(graph)


def product_of_two_dtypes(graph: TrainingGraph, group: str) -> fx.Node:
    tangent = tangent_of(graph)
    column = add_call(graph, aten.view.default, tangent, [3, 1])
    low = add_call(graph, aten._to_copy.default, column, dtype=torch.bfloat16)
    row = add_call(graph, aten.view.default, tangent, [1, 3])
    node = add_call(graph, aten.mm.default, row, column)
    node.args = (row, low)
    return node


def cast_for_nothing(graph: TrainingGraph, group: str) -> fx.Node:
    node = add_call(graph, aten._to_copy.default, tangent_of(graph), dtype=torch.bfloat16)
    node.meta["provenance"] = ANY_ORIGIN
    return node


def cast_of_a_cast(graph: TrainingGraph, group: str) -> fx.Node:
    node = cast_for_nothing(graph, group)
    add_call(graph, aten._to_copy.default, node, dtype=torch.float32)
    return node


BREAKERS = [
    (computes_among_inputs, "inputs_first", "is an input behind 'full_default'"),
    (use_before_definition, "defined_before_use", "uses 'mul' before it is defined"),
    (no_value, "has_value", "has no fake value (meta['val'])"),
    (
        part_of_another_dtype,
        "has_value",
        "is said to be torch.bfloat16, but is torch.float32",
    ),
    (input_without_value, "has_value", "has no fake value (meta['val'])"),
    (input_without_role, "has_roles", "is an input with role None"),
    (unknown_input_kind, "has_roles", "is an input with role Role(kind='gradient', name='p0')"),
    (unknown_output_kind, "has_roles", "has an output with role Role(kind='tangent', name='p0')"),
    (too_few_roles, "has_roles", "has 2 outputs and 1 roles"),
    (no_roles, "has_roles", "has 1 outputs and 0 roles"),
    (never_awaited, "waited_once", "is awaited 0 times"),
    (awaited_twice, "waited_once", "is awaited 2 times"),
    (read_in_flight, "waited_once", "reads 'all_reduce_default', which is still in flight"),
    (returned_in_flight, "waited_once", "reads 'all_reduce_default', which is still in flight"),
    (write_in_place, "functional", "aten.neg_.default writes its input"),
    (copy_to_intermediate, "functional", "aten.copy_.default writes its input"),
    (unknown_state, "state_keeps_its_form", "writes state 'residual/p0', which is not an input"),
    (
        state_of_other_shape,
        "state_keeps_its_form",
        "writes torch.float32[3] to state 'residual/p0' of torch.float32[4]",
    ),
    (
        state_of_other_dtype,
        "state_keeps_its_form",
        "writes torch.float32[3] to state 'residual/p0' of torch.float64[3]",
    ),
    (state_written_twice, "state_keeps_its_form", "writes state 'residual/p0' a second time"),
    (
        product_of_two_dtypes,
        "products_read_one_dtype",
        "reads torch.bfloat16 and torch.float32",
    ),
    (cast_for_nothing, "casts_are_needed", "is a cast that feeds nothing"),
    (cast_of_a_cast, "casts_are_needed", "is a cast that feeds only casts"),
]


def test_every_rule_has_a_graph_that_breaks_it():
    assert {rule for _, rule, _ in BREAKERS} == {rule.__name__ for rule in spec.ALWAYS}


@pytest.mark.parametrize(
    ("breaker", "rule", "what"), BREAKERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_broken_rule_names_pass_rule_and_node(fake_world, breaker: Breaker, rule, what):
    graph = doubled((3,))
    spec.check(graph, "(input)")
    blamed = breaker(graph, fake_world)
    with pytest.raises(SpecError) as caught:
        spec.check(graph, "some_pass")
    said = f"after pass 'some_pass': rule '{rule}': node '{blamed.name}' {what}"
    assert str(caught.value) == said


def test_case_39_the_pass_that_broke_the_graph_is_named():
    broken = Does(action=lambda graph: use_before_definition(graph, "") and None)
    with pytest.raises(SpecError, match=r"after pass 'does': .*: node 'neg_default' uses 'mul'"):
        checked(doubled((3,)), Bucketing(mb=1), broken)


@dataclasses.dataclass(frozen=True)
class BreaksFirst(Does):
    name = "breaks_first"


def test_case_39_the_first_of_several_passes_is_named():
    culprit = BreaksFirst(action=lambda graph: no_value(graph, "") and None)
    with pytest.raises(SpecError, match=r"after pass 'breaks_first': .*node 'neg_default'"):
        checked(doubled((3,)), culprit, Does())


def test_case_39_a_graph_that_was_broken_before_is_blamed_on_the_input():
    graph = doubled((3,))
    write_in_place(graph, "")
    with pytest.raises(SpecError, match=r"after pass '\(input\)': rule 'functional': node 'neg_"):
        checked(graph, Does())


# Graphs that obey


@pytest.mark.parametrize(
    ("program", "example"),
    [
        (Zoo(), Zoo.example()),
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(4, 3)),
        (nn.Sequential(nn.Embedding(5, 3), nn.Dropout(0.5)), torch.zeros(2, dtype=torch.long)),
        (nn.MultiheadAttention(4, 2), torch.randn(3, 4)),
    ],
    ids=["zoo", "batch_norm", "dropout", "attention"],
)
def test_captured_graphs_obey(program, example):
    inputs = [example] * (3 if isinstance(program, nn.MultiheadAttention) else 1)
    found = capture(lambda *xs: program(*xs), *inputs)
    for graph in (found.joint, found.backward):
        spec.check(graph, "(input)")


def test_a_captured_graph_with_a_runtime_assertion_obeys():
    layer = nn.Linear(4, 4)

    def first_rows(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        rows = n.item()
        torch._check(rows >= 2)
        torch._check(rows <= 3)
        return layer(x)[:rows]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        spec.check(capture(first_rows, torch.randn(3, 4), torch.tensor(2)).joint, "(input)")


def test_a_copy_onto_an_input_obeys():
    graph = doubled((3,))
    add_call(graph, aten.copy_.default, tangent_of(graph), graph.gradients()[0].node)
    spec.check(graph, "(input)", (spec.functional,))


def test_a_collective_with_one_wait_obeys(fake_world):
    graph = doubled((3,))
    add_call(graph, C10D.wait_tensor.default, launch_of(graph, fake_world))
    spec.check(graph, "(input)")


def test_state_written_in_its_form_obeys():
    graph = doubled((3,))
    graph.write_state(add_state(graph, (3,), torch.float32), graph.gradients()[0].node)
    spec.check(graph, "(input)")


# reduced_once


def reduce_gradient(graph: TrainingGraph, index: int, group: str, times: int) -> None:
    node = graph.gradients()[index].node
    for _ in range(times):
        launch = add_call(graph, C10D.all_reduce.default, node, "sum", group)
        launch.meta["reduces"] = True
        node = add_call(graph, C10D.wait_tensor.default, launch)
    graph.set_output(index, node)


@pytest.mark.parametrize("times", [0, 2, 3])
def test_a_gradient_is_reduced_once(fake_world, times):
    graph = doubled((3,), (4,))
    reduce_gradient(graph, 0, fake_world, 1)
    reduce_gradient(graph, 1, fake_world, times)
    blamed = graph.gradients()[1].node.name
    said = f"rule 'reduced_once': node '{blamed}' is the gradient of 'p1' and was reduced {times} "
    with pytest.raises(SpecError, match=re.escape(said)):
        spec.check(graph, "x", (spec.reduced_once,))


def test_what_says_how_gradients_are_encoded_is_no_way(fake_world):
    graph = doubled((3,))
    node = graph.gradients()[0].node
    base = add_call(graph, torch.ops.aten.neg.default, node)
    reduce_gradient(graph, 0, fake_world, 1)
    product = add_call(graph, torch.ops.aten.mul.Tensor, graph.gradients()[0].node, base)
    graph.set_output(0, product)
    with pytest.raises(SpecError, match="was reduced 0 or 1 times"):
        spec.check(graph, "x", (spec.reduced_once,))
    base.meta["encoding"] = True
    spec.check(graph, "x", (spec.reduced_once,))


def test_collectives_of_the_model_are_no_reductions(fake_world):
    graph = doubled((3,))
    reduce_gradient(graph, 0, fake_world, 2)
    first, _ = nodes_with(graph, C10D.all_reduce.default)
    del first.meta["reduces"]
    spec.check(graph, "x", (spec.reduced_once,))


def test_an_empty_gradient_needs_no_reduction():
    spec.check(doubled((0, 3)), "x", (spec.reduced_once,))


def pending_state(graph: TrainingGraph, parameter: str, kind: str = PENDING_STATE) -> fx.Node:
    return graph.add_state(StateSpec(kind, parameter, (3,), torch.float32, CPU))


def test_what_waits_is_counted_like_a_gradient(fake_world):
    """The gradient of a parameter that only other ranks' graphs have."""
    graph = doubled((3,))
    graph.add_output(pending_state(graph, "absent"), Role("gradient", "absent"))
    reduce_gradient(graph, 0, fake_world, 1)
    said = "node 'state_pending_absent' is the gradient of 'absent' and was reduced 0 times"
    with pytest.raises(SpecError, match=re.escape(said)):
        spec.check(graph, "x", (spec.reduced_once,))
    reduce_gradient(graph, 1, fake_world, 1)
    spec.check(graph, "x", (spec.reduced_once,))


def test_what_waits_may_be_added_before_the_reduction_only(fake_world):
    before, behind = doubled((3,)), doubled((3,))
    for graph in (before, behind):
        waiting = pending_state(graph, "p0")
        for step in (1, 2):
            if (graph is before) == (step == 1):
                total = add_call(graph, aten.add.Tensor, graph.gradients()[0].node, waiting)
                graph.set_output(0, total)
            else:
                reduce_gradient(graph, 0, fake_world, 1)
    spec.check(before, "x", (spec.reduced_once,))
    said = "is the gradient of 'p0' and was reduced 0 or 1 times"
    with pytest.raises(SpecError, match=said):
        spec.check(behind, "x", (spec.reduced_once,))


def test_other_state_is_no_gradient(fake_world):
    """A residual that is added behind the reduction is a matter of the pass that holds it."""
    graph = doubled((3,))
    reduce_gradient(graph, 0, fake_world, 1)
    residual = pending_state(graph, "p0", kind="residual")
    graph.set_output(0, add_call(graph, aten.add.Tensor, graph.gradients()[0].node, residual))
    spec.check(graph, "x", (spec.reduced_once,))


def test_undoing_the_reduction_later_is_noticed(fake_world):
    graph = doubled((3,))
    raw = graph.gradients()[0].node

    def bypass(graph: TrainingGraph) -> None:
        graph.set_output(0, raw)

    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    with pytest.raises(SpecError, match="after pass 'does': rule 'reduced_once': node 'mul'"):
        checked(graph, Bucketing(mb=1), sync, Does(action=bypass))


# A pass and what it says of itself


def test_a_pass_that_hides_a_change_is_found_out():
    def act(graph: TrainingGraph) -> Report:
        add_call(graph, aten.neg.default, tangent_of(graph))
        return Report(changed=False)

    with pytest.raises(SpecError, match="after pass 'does': it reports no change, which is not so"):
        checked(doubled((3,)), Does(action=act))


def test_a_pass_that_claims_a_change_is_found_out():
    with pytest.raises(SpecError, match="after pass 'does': it reports a change, which is not so"):
        checked(doubled((3,)), Does(action=lambda graph: Report(changed=True)))


def test_marking_a_node_is_a_change():
    def mark(graph: TrainingGraph) -> Report:
        tangent_of(graph).meta["effect"] = "fault"
        return Report(changed=True)

    assert checked(doubled((3,)), Does(action=mark))[0].report.changed


# The signature


def narrow_a_gradient(graph: TrainingGraph) -> None:
    graph.set_output(0, add_call(graph, aten.unsqueeze.default, graph.gradients()[0].node, 0))


def drop_a_gradient(graph: TrainingGraph) -> None:
    graph.output_node.args = (graph.output_node.args[0][:1],)
    graph.output_node.meta["roles"] = graph.output_node.meta["roles"][:1]


def rename_a_gradient(graph: TrainingGraph) -> None:
    graph.output_node.meta["roles"] = (Role("gradient", "q"), Role("gradient", "p1"))


def replace_a_gradient_by_none(graph: TrainingGraph) -> None:
    graph.output_node.args = ((None, graph.output_node.args[0][1]),)


def add_a_saved_input(graph: TrainingGraph) -> None:
    graph.add_input("extra", Role("saved", "extra"), tangent_of(graph).meta["val"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (narrow_a_gradient, r"\(Role\(kind='gradient', name='p0'\), \(3,\), .* became .*\(1, 3\)"),
        (drop_a_gradient, "4 inputs and outputs became 3"),
        (rename_a_gradient, "name='p0'.* became .*name='q'"),
        (replace_a_gradient_by_none, "became .*NoneType"),
        (add_a_saved_input, "became .*'saved'"),
    ],
)
def test_a_pass_keeps_the_signature(change, said):
    with pytest.raises(SpecError, match=f"after pass 'does': rule 'signature': .*{said}"):
        checked(doubled((3,), (4,)), Does(action=change))


def test_state_is_no_part_of_the_signature():
    def add(graph: TrainingGraph) -> None:
        graph.write_state(add_state(graph, (3,), torch.float32), tangent_of(graph))

    graph = doubled((3,))
    before = spec.signature(graph)
    checked(graph, Does(action=add))
    assert spec.signature(graph) == before


def test_the_signature_has_role_shape_and_dtype():
    graph = traced(lambda x: (x.double(),), torch.ones(2, 3))
    assert spec.signature(graph) == [
        (tangent_of(graph).meta["role"], (2, 3), torch.float32, torch.device("cpu")),
        (Role("gradient", "p0"), (2, 3), torch.float64, torch.device("cpu")),
    ]


def test_absent_gradients_have_a_place_in_the_signature():
    graph = backward_of(nn.Linear(3, 2), torch.randn(2, 3))
    absent = [row for row in spec.signature(graph) if row[1] is type(None)]
    assert [row[0].kind for row in absent] == ["input_gradient"]


def collective(graph: TrainingGraph, group: str) -> fx.Node:
    launch = launch_of(graph, group)
    add_call(graph, C10D.wait_tensor.default, launch)
    return launch


def test_a_node_with_an_effect_may_not_go(fake_world):
    graph = doubled((3,))
    launch = collective(graph, fake_world)
    before = spec.effects(graph)
    assert len(before) == 2
    spec.check_effects(before, graph, "some_pass")
    graph.graph.erase_node(launch.next)
    graph.graph.erase_node(launch)
    with pytest.raises(SpecError, match=f"rule 'effects': node '{before[0]}' was removed"):
        spec.check_effects(before, graph, "some_pass")


def test_a_node_with_an_effect_may_not_pass_another(fake_world):
    graph = doubled((3,))
    first, second = collective(graph, fake_world), collective(graph, fake_world)
    before = spec.effects(graph)
    first.prepend(second)
    with pytest.raises(SpecError, match="or moved past"):
        spec.check_effects(before, graph, "some_pass")


def test_new_nodes_with_an_effect_may_stand_anywhere(fake_world):
    graph = doubled((3,))
    first = collective(graph, fake_world)
    before = spec.effects(graph)
    second = collective(graph, fake_world)
    first.prepend(second)
    spec.check_effects(before, graph, "some_pass")
