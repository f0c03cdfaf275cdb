"""MeasureNorms: what it measures, of which parameters, and that it changes no gradient."""

from __future__ import annotations

import math

import pytest
import torch

from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.compress import Compress
from fxpasses.passes.measure_norms import DECAY, MeasureNorms
from fxpasses.testing.world import World
from tests.graphs import checked, doubled

ADAPTIVE = "adaptive:levels=int8/topk"
LEVELS = (("p0", "int8"), ("p2", "int8"))


def measured(
    graph: TrainingGraph, group: str, scheme: str, levels=LEVELS, world: int = 2
) -> Report:
    sync = {"group": group, "world": world, "rank": 0, "reduce": "mean"}
    return checked(
        graph,
        Bucketing(mb=1, scheme=scheme, levels=levels),
        Compress(scheme=scheme, levels=levels, **sync),
        MeasureNorms(scheme=scheme, levels=levels),
    )[-1].report


def run(graph: TrainingGraph, gradients: list[torch.Tensor], states: dict[str, torch.Tensor]):
    """Two ranks with the same gradients; outputs of one."""
    row = [*(g / 2 for g in gradients)]
    row += [states[role.name] for _, role in graph.inputs("state")]
    outputs = World([graph, graph], [row, row]).run()[0]
    states.update({role.name: outputs[at] for at, _, role in graph.outputs("state")})
    return outputs[: len(gradients)]


def test_norms_averages_and_counts_of_what_has_a_level(fake_world):
    graph = doubled((3,), (2,), (2, 2))
    assert measured(graph, fake_world, ADAPTIVE) == Report(True, {"measured": 2})
    states = {r.name: torch.zeros(n.meta["val"].shape) for n, r in graph.inputs("state")}
    assert "statistics/p0" in states and states["statistics/p0"].shape == (6,)
    average = torch.zeros(2)
    for step in range(1, 4):
        gradients = [torch.randn(s) * step for s in ((3,), (2,), (2, 2))]
        outputs = run(graph, gradients, states)
        norms = torch.stack([outputs[0].norm(), outputs[2].norm()])
        average = DECAY * average + (1 - DECAY) * norms
        expected = torch.stack([norms, average, torch.full((2,), float(step))], 1)
        torch.testing.assert_close(states["statistics/p0"].view(2, 3), expected)


def test_without_levels_all_adaptive_parameters_are_measured(fake_world):
    graph = doubled((3,), (2,))
    report = measured(graph, fake_world, f"p0=none;p1={ADAPTIVE}", levels=None)
    assert report.counts == {"measured": 1}


@pytest.mark.parametrize(("scheme", "levels"), [("int8", None), (ADAPTIVE, ())])
def test_a_graph_without_levels_is_left_alone(fake_world, scheme, levels):
    graph = doubled((3,), (2,))
    sync = {"group": fake_world, "world": 2, "rank": 0, "reduce": "mean"}
    checked(
        graph,
        Bucketing(mb=1, scheme=scheme, levels=levels),
        Compress(scheme=scheme, levels=levels, **sync),
    )
    before = graph.fingerprint()
    assert not MeasureNorms(scheme=scheme, levels=levels).run(graph).changed
    assert graph.fingerprint() == before


def test_gradients_stay_bitwise_what_they_were(fake_world):
    plain, graph = doubled((3,), (2,), (2, 2)), doubled((3,), (2,), (2, 2))
    measured(graph, fake_world, ADAPTIVE)
    sync = {"group": fake_world, "world": 2, "rank": 0, "reduce": "mean"}
    checked(
        plain,
        Bucketing(mb=1, scheme=ADAPTIVE, levels=LEVELS),
        Compress(scheme=ADAPTIVE, levels=LEVELS, **sync),
    )
    gradients = [torch.randn(s) for s in ((3,), (2,), (2, 2))]
    found = [
        run(g, gradients, {r.name: torch.zeros(n.meta["val"].shape) for n, r in g.inputs("state")})
        for g in (plain, graph)
    ]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(fake_world, dtype):
    graph = doubled((3,), (2,), dtype=dtype)
    assert measured(graph, fake_world, ADAPTIVE, levels=None).counts == {"measured": 2}
    states = {
        role.name: torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        for node, role in graph.inputs("state")
    }
    outputs = run(graph, [torch.full((3,), 3.0, dtype=dtype), torch.zeros(2, dtype=dtype)], states)
    norms = states["statistics/p0"].view(2, 3)[:, 0]
    torch.testing.assert_close(norms, torch.stack([g.float().norm() for g in outputs]))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_left_out(fake_world, value):
    graph = doubled((3,), (2,), (2, 2))
    measured(graph, fake_world, ADAPTIVE)
    states = {r.name: torch.zeros(n.meta["val"].shape) for n, r in graph.inputs("state")}
    run(graph, [torch.ones(s) for s in ((3,), (2,), (2, 2))], states)
    before = states["statistics/p0"].clone()
    run(graph, [torch.full((3,), value), torch.ones(2), torch.ones(2, 2)], states)
    assert torch.equal(states["statistics/p0"], before)


def test_the_contract():
    assert MeasureNorms.requires == {"compressed"} and MeasureNorms.preserves_numerics
    assert MeasureNorms(levels=LEVELS).spec == "measure_norms"
