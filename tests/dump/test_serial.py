"""Graphs as JSON, and back."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from torch import fx, nn

from fxpasses import spec
from fxpasses.config import Hardening
from fxpasses.dump.serial import Records, encoded, graph_of
from fxpasses.graph import StateSpec, TrainingGraph
from fxpasses.passes.cast import Cast
from fxpasses.pipeline import build
from fxpasses.rewrite import model_line
from fxpasses.testing import capture, gradient_graphs
from fxpasses.trace import trace
from tests.graphs import Zoo, doubled


def back(graph: TrainingGraph) -> TrainingGraph:
    return graph_of(json.loads(Records().text(None, graph)))


def alike(a: TrainingGraph, b: TrainingGraph) -> bool:
    same = a.fingerprint() == b.fingerprint() and spec.signature(a) == spec.signature(b)
    return same and a.written_buffers == b.written_buffers


@settings(max_examples=50, deadline=None)
@given(gradient_graphs())
def test_drawn_graphs_read_back(drawn):
    graph = drawn.build()
    assert alike(back(graph), graph)


@pytest.mark.parametrize("stage", ["joint", "backward"])
def test_captured_graphs_read_back(stage):
    graph = getattr(capture(Zoo(), Zoo.example()), stage)
    found = back(graph)
    assert alike(found, graph)
    for old, new in zip(graph.graph.nodes, found.graph.nodes, strict=True):
        value, read = old.meta.get("val"), new.meta.get("val")
        if isinstance(value, torch.Tensor):
            assert (read.shape, read.stride(), read.dtype) == (
                value.shape,
                value.stride(),
                value.dtype,
            )


def test_passes_do_the_same_to_what_was_read_back():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                y = self.a(x)
            return self.head(y)

    graph = capture(Net(), torch.randn(3, 4)).joint
    found, rules = back(graph), Cast("bf16", "head.*=deny")
    assert rules.run(graph).counts == rules.run(found).counts
    assert alike(found, graph)
    assert [n.meta.get("provenance", None) is None for n in found.graph.nodes] == [
        n.meta.get("provenance", None) is None for n in graph.graph.nodes
    ]


def test_state_and_effects_read_back(fake_world):
    graph = doubled((3,), (2, 2))
    options = Hardening(compression="int8", loss_scale="dynamic", clip_norm=1.0)
    build(options, fake_world, 4, 1).run("backward", graph)
    found = back(graph)
    assert alike(found, graph)
    assert [n.meta["state"] for n, _ in found.inputs("state")] == [
        n.meta["state"] for n, _ in graph.inputs("state")
    ]
    spec.check(found, "read", (*spec.ALWAYS, spec.reduced_once))


def test_graphs_in_graphs_and_constants_read_back():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            z = torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y + 1, (y,))
            return z * torch.tensor([1.0, 2.0, 3.0, math.inf])

    for graph in trace(Branches(), (torch.ones(2, 4),)):
        found = back(graph.after)
        assert alike(found, graph.after)
        inner = [m for m in found.module.modules() if isinstance(m, fx.GraphModule)]
        assert len(inner) >= 2
    inputs = [torch.randn(n.meta["val"].shape) for n, _ in found.inputs()]
    inputs[1] = torch.tensor(True)
    assert len(fx.Interpreter(found.module).run(*inputs)) == len(found.outputs())


def test_symbolic_sizes_become_examples():
    x = torch.ones(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    joint, _ = trace(nn.Linear(4, 4), (x,))
    found = back(joint.after)
    assert 5 in {n.meta["val"] for n, _ in found.inputs() if isinstance(n.meta["val"], int)}
    spec.check(found, "read")


def test_lines_of_the_model_read_back():
    graph = capture(Zoo(), Zoo.example()).joint
    lines = {model_line(n).rpartition(":")[2] for n in back(graph).walk()}
    assert lines == {model_line(n).rpartition(":")[2] for n in graph.walk()} and len(lines) > 1


def test_another_format_is_refused():
    with pytest.raises(ValueError, match="format 99; expected 1"):
        graph_of({"format": 99})


def test_what_can_not_be_written_can_not_be_read():
    graph = doubled((3,))
    (call,) = graph.walk()
    call.kwargs = {"generator": torch.Generator()}
    assert encoded(torch.Generator()) == {"unknown": "torch._C.Generator"}
    with pytest.raises(ValueError, match="holds a torch._C.Generator, which was not written"):
        back(graph)


def test_a_node_is_written_anew_when_it_changes():
    graph = doubled((3,))
    records = Records()
    first = records.text(None, graph)
    assert records.text(None, graph) == first
    (call,) = graph.walk()
    call.args = (call.args[0], 3)
    assert records.text(None, graph) == Records().text(None, graph) != first
    graph.add_state(StateSpec("memory", "x", (), torch.float32, torch.device("cpu")))
    graph.inputs()[0][0]._rename("other")
    assert records.text(None, graph) == Records().text(None, graph)
