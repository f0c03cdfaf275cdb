"""Schedules to look at."""

from __future__ import annotations

import json

import pytest
import torch

from fxpasses.schedule.machine import Machine
from fxpasses.schedule.plan import Plan, at_other_worlds, plan_step
from fxpasses.schedule.timeline import TRACKS, draw, predicted, write_trace
from fxpasses.trace import trace
from tests.graphs import mlp

OPTIONS = {"bucket_mb": 0.005, "compression": "int8"}
MACHINE = Machine(bandwidth=3e6, flops=1e8)


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = mlp(32, 64, 64, 8)
    return plan_step(trace(model, (torch.ones(4, 32),), OPTIONS, world=4), MACHINE, 4)


def test_the_figures_of_a_plan_fit_together(plan):
    busy = plan.busy_s
    assert plan.step_s == pytest.approx(busy["compute"] + busy["codec"] + plan.exposed_s)
    assert plan.bound <= plan.step_s
    agreement = [t for t in plan.program.tasks if t.name == "agreement" and t.resource != "compute"]
    exposed = sum(row.exposed for row in plan.buckets) + sum(t.duration for t in agreement)
    assert len(agreement) == 1 and exposed == pytest.approx(plan.exposed_s)
    parameters = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8
    assert sum(row.gradient_bytes for row in plan.buckets) == 4 * parameters
    assert (
        plan.memory["parameters"]
        == plan.memory["gradients"]
        == plan.memory["state"]
        == 4 * parameters
    )


def test_the_overlap_table_says_what_is_hidden(plan):
    assert len(plan.buckets) >= 2
    for row in plan.buckets:
        assert row.available + row.exposed == pytest.approx(row.needed)
        assert row.gradient_bytes < 1000 or 3.0 < row.ratio < 4.0  # int8, with scales
        assert row.feasible == (not row.advice)
    last = plan.buckets[-1]
    assert not last.feasible and ("times less" in last.advice or "smaller" in last.advice)


def test_other_numbers_of_ranks_are_planned_without_tracing_again(plan):
    model = mlp(32, 64, 64, 8)
    graphs = trace(model, (torch.ones(4, 32),), OPTIONS, world=2)
    one, two, four = at_other_worlds(graphs, OPTIONS, MACHINE, (1, 2, 4))
    assert one.exposed_s == 0 and not one.buckets
    assert one.step_s < two.step_s < four.step_s
    assert four.step_s == pytest.approx(plan.step_s)
    assert two.step_s == pytest.approx(plan_step(graphs, MACHINE, 2).step_s)


def test_slices_cover_what_the_host_does(plan):
    slices = predicted(plan.program, plan.schedule)
    host = [s for s in slices if s.track != "link"]
    now = 0.0
    for one in host:
        assert one.start == pytest.approx(now, abs=1e-12)
        now = one.start + one.duration
    assert now == pytest.approx(plan.step_s)
    waits = sum(s.duration for s in slices if s.kind == "wait")
    assert waits == pytest.approx(plan.exposed_s)


def test_the_trace_has_a_process_a_rank_and_arrows_to_what_decodes(plan, tmp_path):
    slices = predicted(plan.program, plan.schedule)
    write_trace(tmp_path / "t.json", {0: slices, 1: slices}, "predicted")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0 predicted", "rank 1 predicted"}
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert tracks == list(TRACKS)
    drawn = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert len(drawn) == len(slices)
    links = [e for e in drawn if e["cat"] == "link"]
    for phase in ("s", "f"):
        assert sum(e["ph"] == phase and e["pid"] == 0 for e in events) == len(links)
    arrows: dict[int, list] = {}
    for event in events:
        if event.get("cat") == "bucket":
            arrows.setdefault(event["id"], []).append(event)
    for chain in arrows.values():
        assert [TRACKS[e["tid"]] for e in chain] in (["link", "codec", "codec"], ["link", "codec"])
        assert [e["ts"] for e in chain] == sorted(e["ts"] for e in chain)


def test_a_chart_is_a_png(plan, tmp_path):
    pytest.importorskip("matplotlib")
    draw(tmp_path / "t.png", {0: predicted(plan.program, plan.schedule)}, "plan")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_backward_there_is_nothing_to_plan():
    model = mlp(4, 4)
    graphs = trace(model.requires_grad_(False), (torch.ones(2, 4),))
    with pytest.raises(ValueError, match="records no backward"):
        plan_step(graphs, Machine(), 2)
