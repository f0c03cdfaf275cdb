"""Which nodes have an effect."""

from __future__ import annotations

import pytest
import torch

from fxpasses.effects import is_collective, is_effectful, is_launch, is_wait
from tests.graphs import C10D, add_call, doubled

aten = torch.ops.aten
QUESTIONS = (is_collective, is_launch, is_wait, is_effectful)


@pytest.mark.parametrize(
    ("target", "arguments", "answers"),
    [
        (C10D.all_reduce.default, ("sum", "0"), (True, True, False, True)),
        (C10D.all_reduce_.default, ("sum", "0"), (True, True, False, True)),
        (C10D.all_gather_into_tensor.default, (4, "0"), (True, True, False, True)),
        (C10D.wait_tensor.default, (), (True, False, True, True)),
        (aten.neg.default, (), (False, False, False, False)),
        (aten.neg_.default, (), (False, False, False, True)),
    ],
)
def test_operators(fake_world, target, arguments, answers):
    graph = doubled((3,))
    node = add_call(graph, target, graph.inputs()[0][0], *arguments)
    assert tuple(question(node) for question in QUESTIONS) == answers


def test_a_mark_makes_an_effect_and_no_collective():
    graph = doubled((3,))
    (node,) = graph.walk()
    assert not is_effectful(node)
    node.meta["effect"] = "fault"
    assert is_effectful(node) and not is_collective(node)


def test_inputs_and_outputs_are_no_collectives():
    graph = doubled((3,))
    for node in (graph.inputs()[0][0], graph.output_node):
        assert not is_collective(node)
