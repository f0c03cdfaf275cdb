"""The graphs of a program, seen without compiling it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn

from fxpasses import register_pass, spec
from fxpasses.distributed.group import is_initialized
from fxpasses.facts import planned_collectives
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass, Report
from fxpasses.trace import TracedGraph, trace
from tests.graphs import mlp

X = torch.ones(4, 3)


def by_name(graphs: list[TracedGraph]) -> dict[str, TracedGraph]:
    return {str(g.name): g for g in graphs}


def ran(graph: TracedGraph) -> list[str]:
    return [done.made_by.name for done in graph.done]


def test_joint_and_backward_of_a_rank():
    found = by_name(trace(mlp(3, 4, 1), (X,), {"precision": "bf16"}, world=4, rank=2))
    assert list(found) == ["rank2/g0.joint", "rank2/g0.backward"]
    joint, backward = found.values()
    assert ran(joint) == ["cast"]
    assert ran(backward) == ["participation", "running_stats", "bucketing", "gradient_sync"]
    assert (
        not planned_collectives(backward.before) and len(planned_collectives(backward.after)) == 1
    )
    spec.check(backward.after, "all", (*spec.ALWAYS, spec.reduced_once))
    assert not is_initialized()


def test_one_rank_communicates_nothing():
    _, backward = trace(mlp(3, 1), (X,))
    assert ran(backward) == [] and not planned_collectives(backward.after)
    assert backward.before is not backward.after
    assert backward.before.fingerprint() == backward.after.fingerprint()


def test_regions_count_from_zero_in_each_trace():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    for _ in range(2):
        names = [str(g.name) for g in trace(Broken(), (X,), world=2)]
        assert names == [f"rank0/g{i}.{graph}" for i in (0, 1) for graph in ("joint", "backward")]


def test_a_forward_without_backward():
    (graph,) = trace(mlp(3, 1).requires_grad_(False), (X,), {"precision": "bf16"}, world=2)
    assert str(graph.name) == "rank0/g0.inference" and ran(graph) == ["cast"]


def test_a_whole_step():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    found = by_name(trace(step, (mlp(3, 1), X), world=2))
    assert list(found) == ["rank0/g0.joint", "rank0/g0.backward"]
    assert len(planned_collectives(found["rank0/g0.backward"].after)) == 1


def test_a_backward_that_the_program_runs_makes_no_gradients():
    def step(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x).sum()
        torch._dynamo.graph_break()
        loss.backward()

    model = mlp(3, 1)
    names = [str(g.name) for g in trace(step, (model, X), {"compression": "int8"}, world=2)]
    assert names == ["rank0/g0.joint", "rank0/g0.backward"]
    assert all(p.grad is None for p in model.parameters())


def test_the_program_stays_as_it_was():
    model = nn.BatchNorm1d(3)
    trace(model, (X,), world=2)
    assert all(p.grad is None for p in model.parameters())


def test_graphs_are_those_in_front_of_inductor():
    joint, _ = trace(nn.LayerNorm(3), (X,))
    targets = {str(node.target) for node in joint.before.walk()}
    assert "aten.var_mean.correction" in targets  # the norm is decomposed
    assert "aten.native_layer_norm.default" not in targets


def test_a_watcher_looks_on():
    seen: list[str] = []

    def watcher(name):
        return [
            lambda previous, following, graph: seen.append(
                f"{name}: {previous.made_by.name if previous else '-'}"
            )
        ]

    trace(mlp(3, 1), (X,), {"passes": "bucketing{mb=1}"}, watcher=watcher)
    assert seen == [
        "rank0/g0.joint: -",
        "rank0/g0.backward: -",
        "rank0/g0.backward: bucketing",
    ]


def test_wrong_options_are_value_errors():
    with pytest.raises(ValueError, match="unknown pass 'bucketign'"):
        trace(mlp(3, 1), (X,), {"passes": "bucketign"})


def test_a_pass_that_breaks_a_rule_is_a_spec_error(own_registry):
    @register_pass
    @dataclasses.dataclass(frozen=True)
    class Breaks(Pass):
        name: ClassVar[str] = "breaks"
        stage: ClassVar[str] = "backward"

        def run(self, graph: TrainingGraph) -> Report:
            return Report(changed=True)

    with pytest.raises(spec.SpecError, match="reports a change, which is not so"):
        trace(mlp(3, 1), (X,), {"passes": "breaks"})
    assert not is_initialized()
