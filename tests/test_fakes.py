"""Fake values when nodes read another value than before."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxpasses.fakes import lie_alike, read_instead, recompute, refresh
from fxpasses.graph import TrainingGraph
from fxpasses.rewrite import splice
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from tests.graphs import ANY_ORIGIN


def built(*steps: str, layout: str = "expanded") -> TrainingGraph:
    """Each step reads what the one before makes."""
    chain = tuple(Step(step, i) for i, step in enumerate(steps))
    return GradientGraph((Leaf((2, 3), layout=layout),), chain, (len(steps),)).build()


def strides(graph: TrainingGraph) -> list[tuple[int, ...]]:
    return [node.meta["val"].stride() for node in graph.walk()]


def doubled(graph: TrainingGraph) -> tuple[list[fx.Node], fx.Node, fx.Node]:
    """What reads the tangent, the tangent, and its double."""
    ((tangent, _),) = graph.inputs("tangent")
    readers = list(tangent.users)
    twice = splice(
        graph, graph.first_call, lambda x: x * 2, tangent, name="twice", provenance=ANY_ORIGIN
    )
    return readers, tangent, twice


def test_views_of_what_is_dense_now_have_its_strides():
    graph = built("transpose", "neg", "transpose")
    before = strides(graph)
    read_instead(graph, *doubled(graph))
    assert before == [(1, 0), (2, 1), (1, 2)]
    assert strides(graph)[1:] == [(1, 3), (1, 3), (3, 1)]


def test_readers_read_the_other_value():
    graph = built("neg", layout="contiguous")
    readers, tangent, twice = doubled(graph)
    read_instead(graph, readers, tangent, twice)
    assert list(tangent.users) == [twice] and list(twice.users) == readers


def test_where_both_lie_alike_nothing_is_computed(monkeypatch):
    graph = built("transpose", "neg", layout="contiguous")
    readers, tangent, twice = doubled(graph)
    computed: list[fx.Node] = []
    monkeypatch.setattr("fxpasses.fakes.recompute", lambda graph, node: computed.append(node))
    read_instead(graph, readers, tangent, twice)
    assert not computed


def test_no_more_is_computed_than_has_changed():
    graph = built("neg", "transpose", "neg")
    values = [node.meta["val"] for node in graph.walk()]
    readers, tangent, twice = doubled(graph)
    read_instead(graph, readers, tangent, twice)
    now = [node.meta["val"] for node in graph.walk() if node is not twice]
    assert now[0] is not values[0]  # dense as before
    assert all(a is b for a, b in zip(now[1:], values[1:], strict=True))


def test_parts_are_computed_and_dtypes_too():
    graph = built("half")
    split, part = graph.walk()
    _, tangent, twice = doubled(graph)
    assert part.target is operator.getitem
    twice.meta["val"] = twice.meta["val"].double()
    split.replace_input_with(tangent, twice)
    refresh(graph, [split])
    assert part.meta["val"].dtype is torch.float64 and part.meta["val"].stride() == (3, 1)


def test_operators_with_subgraphs_keep_what_was_traced():
    graph = built("neg")
    (node,) = graph.walk()
    value = node.meta["val"]
    node.target = torch.ops.higher_order.cond
    assert not recompute(graph, node) and node.meta["val"] is value


def test_several_values_lie_alike_if_all_do():
    rows, columns = torch.empty(2, 3), torch.empty(3, 2).t()
    assert lie_alike([rows, 1], [rows, 2]) and not lie_alike([rows, columns], [rows, rows])
