"""`splice`: tensor code becomes nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpasses.graph import TrainingGraph
from fxpasses.rewrite import Provenance, model_line, splice
from tests.graphs import (
    ANY_ORIGIN,
    add_call,
    backward_of,
    doubled,
    execute,
    mlp,
    nodes_with,
    random_inputs,
    traced,
)

aten = torch.ops.aten


def spliced(graph: TrainingGraph, fn, *args, name: str = "new", before=None):
    return splice(graph, before or graph.output_node, fn, *args, name=name, provenance=ANY_ORIGIN)


def added(graph: TrainingGraph) -> list:
    return [node for node in graph.walk() if node.meta.get("provenance") is ANY_ORIGIN]


def test_code_becomes_nodes_before_the_given_one():
    graph = doubled((3,), (4,))
    first, second = (g.node for g in graph.gradients())
    result = spliced(graph, lambda x: (x + 1).abs(), first, before=second)
    positions = graph.positions()
    assert [node.target for node in added(graph)] == [aten.add.Tensor, aten.abs.default]
    assert added(graph)[-1] is result is second.prev
    assert positions[first] < positions[added(graph)[0]]


def test_new_nodes_have_names_values_and_provenance():
    graph = doubled((2, 3))
    origin = Provenance("mine", "rule", "mul", "model.py:7", ("p0",))
    node = splice(
        graph,
        graph.output_node,
        lambda x: x.t(),
        graph.gradients()[0].node,
        name="turn",
        provenance=origin,
    )
    assert node.name.startswith("turn_") and node.meta["provenance"] is origin
    assert tuple(node.meta["val"].shape) == (3, 2)
    assert node.meta["val"].fake_mode is graph.fake_mode


def test_names_stay_unique():
    graph = doubled((3,))
    for _ in range(3):
        spliced(graph, torch.neg, graph.gradients()[0].node)
    assert len({node.name for node in graph.graph.nodes}) == len(graph.graph.nodes)
    graph.recompile()
    assert torch.equal(graph.module(torch.ones(3))[0], torch.full((3,), 2.0))


def test_the_nodes_compute_what_the_code_computes():
    graph = doubled((3, 2))
    node = spliced(graph, lambda x, k: torch.softmax(x * k, 0), graph.gradients()[0].node, 0.5)
    graph.set_output(0, node)
    (tangent,) = random_inputs(graph)
    assert torch.equal(execute(graph, [tangent])[0], torch.softmax(tangent * 2 * 0.5, 0))


def test_arguments_and_results_are_trees():
    graph = doubled((3,), (3,))
    first, second = (g.node for g in graph.gradients())
    found = spliced(
        graph,
        lambda pair, *, scale=2: {"sum": pair["a"] + pair["b"][0], "same": pair["a"], "n": scale},
        {"a": first, "b": [second]},
    )
    assert found["same"] is first and found["n"] == 2
    assert found["sum"].args == (first, second)


def test_a_constant_made_in_the_code_is_a_node():
    graph = doubled((3,))
    node = spliced(graph, lambda x: x + torch.zeros(3), graph.gradients()[0].node)
    assert {n.target for n in added(graph)} >= {aten.zeros.default, aten.add.Tensor}
    graph.set_output(0, node)
    assert torch.equal(execute(graph, [torch.ones(3)])[0], torch.full((3,), 2.0))


def test_code_that_returns_its_argument_adds_nothing():
    graph = doubled((3,))
    before = graph.fingerprint()
    node = graph.gradients()[0].node
    assert spliced(graph, lambda x: x, node) is node
    assert graph.fingerprint() == before


def test_the_same_node_may_be_given_twice():
    graph = doubled((3,))
    node = graph.gradients()[0].node
    assert spliced(graph, lambda a, b: a - b, node, node).args == (node, node)


def test_several_results_of_one_operator():
    graph = doubled((2, 4))
    parts = spliced(graph, lambda x: x.split([1, 3], 1), graph.gradients()[0].node)
    assert [tuple(part.meta["val"].shape) for part in parts] == [(2, 1), (2, 3)]


def test_nothing_is_recorded_for_autograd():
    graph = doubled((3,))
    recorded: list[bool] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        recorded.append(torch.is_grad_enabled())
        return x.sin()

    spliced(graph, program, graph.gradients()[0].node)
    assert recorded == [False]
    assert [n.target for n in added(graph)] == [aten.sin.default]


def test_a_decomposition_table_is_used():
    graph = doubled((3,))
    graph.decompositions = {aten.silu.default: lambda x: x * torch.sigmoid(x)}
    spliced(graph, torch.nn.functional.silu, graph.gradients()[0].node)
    assert [n.target for n in added(graph)] == [aten.sigmoid.default, aten.mul.Tensor]


def test_a_branch_is_inlined_with_its_submodules():
    graph = traced(lambda x: (x * 2,), torch.ones(3))
    for _ in range(2):
        node = spliced(
            graph,
            lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
            graph.gradients()[0].node,
        )
    graph.set_output(0, node)
    graph.recompile()
    tangent = torch.ones(3)
    assert torch.equal(graph.module(tangent)[0], torch.sin(tangent * 2))
    assert torch.equal(graph.module(-tangent)[0], torch.cos(tangent * -2))


def test_a_tensor_that_is_no_argument_is_refused():
    graph, outside = doubled((3,)), torch.ones(3)
    with pytest.raises(ValueError, match="uses a tensor that is not an argument"):
        spliced(graph, lambda x: x + outside, graph.gradients()[0].node)


def test_nodes_that_share_one_value_object_stay_apart():
    graph = doubled((3,))
    node = graph.gradients()[0].node
    negative = add_call(graph, aten.neg.default, node)
    negative.meta["val"] = node.meta["val"]
    assert spliced(graph, lambda a, b: a - b, node, negative).args == (node, negative)


# model_line


def test_the_model_line_of_a_captured_node():
    class Cube(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x**3).sum()

    graph = backward_of(nn.Sequential(nn.Linear(2, 2), Cube()), torch.randn(2, 2))
    lines = {model_line(node) for node in nodes_with(graph, aten.pow.Tensor_Scalar)}
    first = Cube.forward.__code__.co_firstlineno
    assert lines == {f"{__file__}:{first + 1}"}


def test_the_model_line_is_the_innermost_frame():
    (node,) = doubled((3,)).walk()
    node.meta["stack_trace"] = (
        '  File "/a/model.py", line 3, in forward\n    return self.l(x)\n'
        '  File "/a b/layer.py", line 14, in forward\n    return x * 2\n'
    )
    assert model_line(node) == "/a b/layer.py:14"


@pytest.mark.parametrize("trace", [None, "", "no frame here"])
def test_a_node_without_trace_has_no_model_line(trace):
    (node,) = doubled((3,)).walk()
    node.meta["stack_trace"] = trace
    assert model_line(node) == ""


def test_gradients_of_a_model_have_lines():
    graph = backward_of(mlp(3, 2), torch.randn(2, 3))
    assert all(model_line(g.node) for g in graph.gradients())
