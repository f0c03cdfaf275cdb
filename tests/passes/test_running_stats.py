"""Rank 0's running statistics travel with each backward."""

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.passes.running_stats import RunningStats
from fxpasses.testing import capture
from tests.graphs import C10D, checked, mlp, nodes_with
from tests.multirank import counted_all_reduces, run_ranks


class Norms(nn.Module):
    """Running statistics of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double()).square().sum()


def test_one_broadcast_for_each_dtype(fake_world):
    graph = capture(Norms(), torch.randn(4, 3)).backward
    (done,) = checked(graph, RunningStats(group=fake_world))
    assert done.report.counts == {"broadcasts": 2, "buffers": 4}
    launches = nodes_with(graph, C10D.broadcast.default)
    assert [n.meta["val"].numel() for n in launches] == [6, 6]
    assert {n.meta["val"].dtype for n in launches} == {torch.float32, torch.float64}
    assert [role.name for _, role in graph.inputs("state")] == [
        f"buffer/{norm}.running_{what}" for norm in ("first", "second") for what in ("mean", "var")
    ]


def test_the_launch_stands_first_and_the_wait_last(fake_world):
    graph = capture(Norms(), torch.randn(4, 3)).backward
    local = {node.name for node in graph.walk()}
    checked(graph, RunningStats(group=fake_world))
    order = [node.name for node in graph.walk()]
    own = [order.index(name) for name in local]
    launches = [order.index(n.name) for n in nodes_with(graph, C10D.broadcast.default)]
    waits = [order.index(n.name) for n in nodes_with(graph, C10D.wait_tensor.default)]
    assert max(launches) < min(own) and max(own) < min(waits)


@pytest.mark.parametrize(
    "model", [mlp(3, 2), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()]
)
def test_a_forward_that_writes_no_buffer_is_left_alone(fake_world, model):
    graph = capture(model, torch.randn(4, 3)).backward
    before = graph.fingerprint()
    (done,) = checked(graph, RunningStats(group=fake_world))
    assert not done.report.changed and graph.fingerprint() == before


def train(rank: int, backend: str, steps: int) -> tuple[dict, dict, int]:
    """(after the last forward, after its backward, all-reduces of a step)"""
    torch.manual_seed(0)
    model = Norms()
    compiled = torch.compile(model, backend=backend)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        loss = compiled(torch.randn(4, 3, generator=generator) + rank)
        between = {name: b.clone() for name, b in model.named_buffers()}
        with counted_all_reduces() as count:
            loss.backward()
    return between, dict(model.named_buffers()), count[0]


@pytest.mark.parametrize("backend", ["hardened", "hardened_aot_eager"])
def test_statistics_of_rank_0_after_each_backward(backend):
    ranks = run_ranks(train, 2, backend, 3)
    (between, after, count), (other_between, other_after, _) = ranks
    assert count == 2  # gradients of two dtypes; statistics are broadcast
    for name, value in after.items():
        assert torch.equal(value, between[name]) and torch.equal(value, other_after[name]), name
        if "running" in name:
            assert not torch.equal(between[name], other_between[name]), f"{name} saw the same batch"


def plan(rank: int) -> list[str]:
    model = Norms()
    torch.compile(model, backend="hardened_aot_eager")(torch.randn(4, 3)).backward()
    return [f"{c.operator} {c.dtype} {c.numel}" for c in fxpasses.runtime(model).plan]


def test_the_plan_says_so():
    assert (
        run_ranks(plan, 2)
        == [
            [
                "broadcast float32 6",
                "broadcast float64 6",
                "all_reduce float64 6",
                "all_reduce float32 6",
            ]
        ]
        * 2
    )


def evaluate(rank: int) -> int:
    model = Norms()
    compiled = torch.compile(model, backend="hardened_aot_eager")
    compiled(torch.randn(4, 3)).backward()
    model.eval()
    before = fxpasses.runtime(model).last_step.collectives
    with torch.no_grad():
        compiled(torch.randn(4, 3))
    return fxpasses.runtime(model).last_step.collectives - before


def test_evaluation_sends_nothing():
    assert run_ranks(evaluate, 2) == [0, 0]
