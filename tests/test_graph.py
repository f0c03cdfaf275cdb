"""`TrainingGraph`: roles, state, dead code, fingerprint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

from fxpasses.graph import Gradient, Role, StateSpec, TrainingGraph, tangents_reaching
from fxpasses.testing import capture
from tests.graphs import (
    C10D,
    TwoHeads,
    add_call,
    backward_of,
    doubled,
    execute,
    mlp,
    nodes_with,
    random_inputs,
    traced,
)

CPU = torch.device("cpu")


def residual(parameter: str, *shape: int) -> StateSpec:
    return StateSpec("residual", parameter, shape, torch.float32, CPU)


def first_tangent(graph: TrainingGraph) -> fx.Node:
    return graph.inputs("tangent")[0][0]


# Roles


def test_roles_of_a_captured_joint_graph():
    graph = capture(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(4, 3)).joint
    kinds = [role.kind for _, role in graph.inputs()]
    parameters = {role.name for _, role in graph.inputs("parameter")}
    buffers = {role.name for _, role in graph.inputs("buffer")}
    assert parameters == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert buffers == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert kinds.count("input") == kinds.count("tangent") == 1
    assert len(graph.outputs("mutation")) == 3 and len(graph.outputs("output")) == 1


def test_roles_of_a_captured_backward_graph():
    graph = backward_of(mlp(4, 3), torch.randn(2, 4))
    assert {role.kind for _, role in graph.inputs()} == {"saved", "tangent"}
    assert [g.parameter for g in graph.gradients()] == ["0.weight", "0.bias"]
    assert [role.kind for _, _, role in graph.outputs()].count("input_gradient") == 1


def test_a_capture_does_not_depend_on_earlier_ones():
    for size in (3, 5):
        graph = backward_of(nn.Linear(size, 2), torch.randn(size, size))
        values = [node.meta["val"] for node, _ in graph.inputs()]
        assert all(isinstance(value, torch.Tensor) for value in values)


def test_an_activation_is_no_gradient():
    graph = backward_of(nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True))
    assert [g.parameter for g in graph.gradients()] == ["weight", "bias"]
    (activation,) = graph.outputs("input_gradient")
    assert isinstance(activation[1], fx.Node)


def test_gradients_give_parameter_node_and_index():
    graph = doubled((3,), (4,))
    _, second = nodes_with(graph, torch.ops.aten.mul.Tensor)
    assert graph.gradients()[1] == Gradient("p1", second, 1)
    graph.output_node.args = ((None, second),)
    assert graph.gradients() == [Gradient("p1", second, 1)]


def test_inputs_and_outputs_are_found_by_kind():
    graph = doubled((3,), (4,))
    assert graph.inputs() == graph.inputs("tangent") and len(graph.inputs()) == 2
    assert graph.inputs("saved") == [] and graph.outputs("output") == []
    assert [i for i, _, _ in graph.outputs("gradient")] == [0, 1]


def test_set_output_replaces_one_and_keeps_roles():
    graph = doubled((3,), (4,))
    roles = graph.output_node.meta["roles"]
    negative = add_call(graph, torch.ops.aten.neg.default, graph.gradients()[1].node)
    graph.set_output(1, negative)
    assert [g.node for g in graph.gradients()][1] is negative
    assert graph.output_node.meta["roles"] == roles


def test_add_output_appends():
    graph = doubled((3,))
    graph.add_output(first_tangent(graph), Role("output", "extra"))
    assert graph.outputs()[-1] == (1, first_tangent(graph), Role("output", "extra"))
    inputs = random_inputs(graph)
    assert execute(graph, inputs)[1] is inputs[0]


def test_add_input_stands_behind_the_others_and_is_callable():
    graph = doubled((3,))
    value = first_tangent(graph).meta["val"]
    node = graph.add_input("extra", Role("saved", "extra"), value)
    assert [n for n, _ in graph.inputs()][-1] is node
    graph.recompile()
    assert torch.equal(graph.module(torch.ones(3), torch.zeros(3))[0], torch.full((3,), 2.0))


def test_add_input_to_a_graph_without_inputs():
    graph = traced(lambda: (torch.ones(3),))
    value = graph.gradients()[0].node.meta["val"]
    node = graph.add_input("extra", Role("saved", "extra"), value)
    assert next(iter(graph.graph.nodes)) is node


def test_the_fake_mode_is_that_of_the_values():
    graph = doubled((3,))
    assert graph.fake_mode is first_tangent(graph).meta["val"].fake_mode


def test_a_graph_without_values_has_no_fake_mode():
    graph = doubled((3,))
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(ValueError, match="trace it under a FakeTensorMode"):
        _ = graph.fake_mode


def test_walk_gives_operator_calls_and_positions_give_order():
    graph = doubled((3,), (4,))
    assert all(node.op == "call_function" for node in graph.walk())
    positions = graph.positions()
    assert [positions[node] for node in graph.graph.nodes] == list(range(len(graph.graph.nodes)))
    assert [positions[node] for node in graph.walk()] == [2, 3]


# State


def test_state_is_an_input_added_once():
    graph = doubled((3,))
    node = graph.add_state(residual("0.weight", 3))
    assert graph.add_state(residual("0.weight", 3)) is node
    assert graph.inputs("state") == [(node, Role("state", "residual/0.weight"))]
    assert tuple(node.meta["val"].shape) == (3,) and node.meta["val"].fake_mode is graph.fake_mode


def test_state_declared_twice_differently_is_refused():
    graph = doubled((3,))
    graph.add_state(residual("0.weight", 3))
    with pytest.raises(AssertionError, match="state residual/0.weight declared twice"):
        graph.add_state(residual("0.weight", 4))


def test_state_is_written_by_one_output_the_last_time_counts():
    graph = doubled((3,))
    spec = residual("0.weight", 3)
    state = graph.add_state(spec)
    graph.write_state(spec.name, state)
    graph.write_state(spec.name, graph.gradients()[0].node)
    assert graph.outputs("state") == [
        (1, graph.gradients()[0].node, Role("state", "residual/0.weight"))
    ]
    tangent, old = torch.ones(3), torch.zeros(3)
    assert torch.equal(execute(graph, [tangent, old])[1], tangent * 2)


def test_states_whose_names_differ_in_a_dot_only_live_side_by_side():
    graph = doubled((3,))
    for parameter in ("a.b", "a_b"):
        graph.add_state(residual(parameter, 3))
    graph.recompile()
    assert torch.equal(graph.module(*[torch.ones(3)] * 3)[0], torch.full((3,), 2.0))


# Dead code


def test_dead_code_goes():
    graph = doubled((3,))
    add_call(graph, torch.ops.aten.neg.default, first_tangent(graph))
    assert graph.eliminate_dead_code()
    assert nodes_with(graph, torch.ops.aten.neg.default) == []
    assert not graph.eliminate_dead_code()


def test_case_39_effects_survive_dead_code_elimination(fake_world):
    graph = doubled((3,))
    tangent = first_tangent(graph)
    fault = add_call(graph, torch.ops.aten.neg.default, tangent)
    fault.meta["effect"] = "fault"
    launch = add_call(graph, C10D.all_reduce.default, tangent, "sum", fake_world)
    assert not graph.eliminate_dead_code()
    assert {fault, launch} <= set(graph.graph.nodes)


def test_effects_in_a_subgraph_survive():
    branch = doubled((3,))
    fault, dead = (
        add_call(branch, torch.ops.aten.neg.default, first_tangent(branch)) for _ in range(2)
    )
    fault.meta["effect"] = "fault"
    graph = doubled((3,))
    graph.module.add_module("branch", branch.module)
    with graph.graph.inserting_before(graph.output_node):
        name = graph.graph.get_attr("branch")
        name.meta["effect"] = "is called"
    assert graph.eliminate_dead_code()
    assert fault in branch.graph.nodes and dead not in branch.graph.nodes
    assert not graph.eliminate_dead_code()


def test_what_an_effect_reads_survives_with_it(fake_world):
    graph = doubled((3,))
    payload = add_call(graph, torch.ops.aten.neg.default, first_tangent(graph))
    add_call(graph, C10D.all_reduce.default, payload, "sum", fake_world)
    assert not graph.eliminate_dead_code()
    assert nodes_with(graph, torch.ops.aten.neg.default) == [payload]


def test_unused_inputs_survive():
    graph = doubled((3,))
    graph.add_state(residual("w", 3))
    graph.eliminate_dead_code()
    assert len(graph.inputs()) == 2


# Fingerprint


def copied(graph: TrainingGraph) -> TrainingGraph:
    return TrainingGraph(copy.deepcopy(graph.module))


def test_the_fingerprint_of_a_copy_is_the_same():
    graph = backward_of(mlp(4, 3), torch.randn(2, 4))
    assert copied(graph).fingerprint() == graph.copy().fingerprint() == graph.fingerprint()


def test_a_change_of_a_copy_is_none_of_the_graph():
    graph = backward_of(mlp(4, 3), torch.randn(2, 4))
    before, copy = graph.fingerprint(), graph.copy()
    copy.add_state(residual("w", 3))
    copy.module.meta["own"] = True
    assert copy.fingerprint() != before == graph.fingerprint()
    assert "own" not in graph.module.meta and copy.fake_mode is graph.fake_mode


def swap_arguments(graph: TrainingGraph) -> None:
    node = nodes_with(graph, torch.ops.aten.mul.Tensor)[0]
    node.args = (node.args[0], 3)


def reverse_outputs(graph: TrainingGraph) -> None:
    graph.output_node.args = (tuple(reversed(graph.output_node.args[0])),)


def rename_role(graph: TrainingGraph) -> None:
    first_tangent(graph).meta["role"] = Role("saved", "other")


def rename_output_role(graph: TrainingGraph) -> None:
    graph.output_node.meta["roles"] = (Role("gradient", "q"), Role("gradient", "p1"))


def add_dead_node(graph: TrainingGraph) -> None:
    add_call(graph, torch.ops.aten.neg.default, first_tangent(graph))


def reorder(graph: TrainingGraph) -> None:
    first, second = nodes_with(graph, torch.ops.aten.mul.Tensor)
    second.append(first)


def add_keyword(graph: TrainingGraph) -> None:
    node = nodes_with(graph, torch.ops.aten.mul.Tensor)[0]
    node.target = torch.ops.aten.add.Tensor
    before = graph.fingerprint()
    node.kwargs = {"alpha": 2}
    assert graph.fingerprint() != before


@pytest.mark.parametrize(
    "change",
    [
        swap_arguments,
        reverse_outputs,
        rename_role,
        rename_output_role,
        add_dead_node,
        reorder,
        add_keyword,
    ],
)
def test_any_change_changes_the_fingerprint(change):
    graph = doubled((3,), (3,))
    before = graph.fingerprint()
    change(graph)
    assert graph.fingerprint() != before


# Tangents


def test_tangents_that_reach_each_gradient():
    graph = traced(lambda a, b: (a * 2, b * 2, a + b, torch.ones(3)), *[torch.ones(3)] * 2)
    reach = tangents_reaching(graph)
    assert [set(reach[g.node]) for g in graph.gradients()] == [{0}, {1}, {0, 1}, set()]


def test_tangents_of_two_heads():
    graph = backward_of(TwoHeads(), torch.randn(4, 3))
    reach = tangents_reaching(graph)
    found = {g.parameter: set(reach[g.node]) for g in graph.gradients()}
    assert found == {"a.weight": {0}, "a.bias": {0}, "b.weight": {1}, "b.bias": {1}}


def test_state_and_saved_inputs_are_no_tangents():
    graph = doubled((3,))
    state = graph.add_state(residual("w", 3))
    assert tangents_reaching(graph)[state] == frozenset()
