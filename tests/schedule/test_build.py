"""Tasks of a graph."""

from __future__ import annotations

import itertools

import pytest
import torch

from fxpasses.graph import TrainingGraph
from fxpasses.pipeline import Pipeline
from fxpasses.registry import parse_pipeline
from fxpasses.schedule.build import Program, build
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.tasks import in_order, queued
from fxpasses.trace import trace
from fxpasses.variants import SYNCHRONISE, TOTAL, Variant, prepare
from tests.graphs import WORLD, backward_of, mlp


def backward(world: int, compression: str = "none", **options) -> TrainingGraph:
    model = mlp(32, 64, 64, 8)
    options = {"bucket_mb": 0.005, "compression": compression, **options}
    graphs = trace(lambda x: model(x).square().sum(), (torch.ones(4, 32),), options, world=world)
    return graphs[-1].after


def kinds(program: Program) -> list[str]:
    return [work.kind for work in program.works if work.kind != "compute"]


@pytest.mark.parametrize(
    ("world", "compression", "expected"),
    [
        (2, "none", ["codec", "launch", "link", "wait"]),
        (2, "int8", ["codec", "codec", "launch", "link", "wait", "codec"]),
        (4, "int8", ["codec", "codec", *["launch", "link", "wait", "codec"] * 2]),
    ],
)
def test_a_bucket_is_filled_coded_sent_and_decoded(world, compression, expected):
    program = build(backward(world, compression), Machine(), world)
    buckets = {work.bucket for work in program.works if work.kind == "link"}
    assert len(buckets) == 3
    for bucket in buckets:
        found = [w.kind for w in program.works if w.bucket == bucket and w.kind != "compute"]
        assert [k for k, _ in itertools.groupby(found)][: len(expected)] == [
            k for k, _ in itertools.groupby(expected)
        ]


@pytest.mark.parametrize("exchange", ["gradient_sync", "compress{scheme=int8}"])
def test_what_waits_to_be_reduced_changes_no_plan(fake_world, exchange):
    """Ranks that differ in it send the same in the same order."""
    programs, model = [], mlp(8, 16, 16, 4)
    for mode in (SYNCHRONISE, TOTAL):
        graph = backward_of(lambda x: model(x).sum(), torch.ones(4, 8))
        prepare(graph, Variant(mode))
        assert bool(graph.inputs("state")) == (mode == TOTAL)
        pipeline = Pipeline(parse_pipeline(f"bucketing{{mb=0.0005}},{exchange}"))
        environment = {"reduce": "mean", "group": fake_world, "world": WORLD, "rank": 0}
        pipeline.bind(**environment).run("backward", graph)
        programs.append(build(graph, Machine(), WORLD))
    one, total = programs
    assert [w.kind for w in one.works] == [w.kind for w in total.works]
    for a, b in zip(one.tasks, total.tasks, strict=True):
        assert (a.duration, a.resource, a.after, a.memory) == (
            b.duration,
            b.resource,
            b.after,
            b.memory,
        )


def test_one_rank_only_computes():
    program = build(backward(1), Machine(), 1)
    assert {work.kind for work in program.works} == {"compute"}


def test_tasks_come_after_what_they_read():
    program = build(backward(4, "int8"), Machine(), 4)
    in_order(program.tasks)
    for i, work in enumerate(program.works):
        if work.kind == "link":
            assert program.works[i - 1].kind == "launch"
            assert program.tasks[i].after == (i - 1,)
        if work.kind == "wait":
            (read,) = program.tasks[i].after
            assert program.works[read].kind == "link" and program.works[read].bucket == work.bucket


def test_what_the_host_loses_by_sending_runs_beside_the_link():
    graph, host_s = backward(2), 4e-9
    program = build(graph, Machine(host_s=host_s), 2)
    schedule = queued(program.tasks, in_order(program.tasks))
    sends = [i for i, work in enumerate(program.works) if work.kind == "send"]
    assert len(sends) == 3
    for i in sends:
        assert [w.kind for w in program.works[i - 2 : i]] == ["launch", "link"]
        assert program.tasks[i].after == (i - 2,) and program.tasks[i].resource == "compute"
        sent = program.works[i - 1].cost.volume(2)
        assert program.tasks[i].duration == pytest.approx(sent * host_s)
        assert schedule.starts[i] == schedule.ends[i - 2]
    # The last one is computing that the host would have waited in.
    free = build(graph, Machine(), 2)
    lost = schedule.makespan - queued(free.tasks, in_order(free.tasks)).makespan
    assert lost <= sum(program.tasks[i].duration for i in sends[:-1]) + 1e-12


def test_the_models_own_computation_keeps_its_order():
    program = build(backward(2), Machine(), 2)
    own = [i for i, work in enumerate(program.works) if work.kind == "compute"]
    assert all(a in program.tasks[b].after for a, b in itertools.pairwise(own))


def test_only_links_run_beside_the_host():
    program = build(backward(4, "int4"), Machine(), 4)
    schedule = queued(program.tasks, in_order(program.tasks))
    assert {task.resource.split(":")[0] for task in program.tasks} == {"compute", "link"}
    total = sum(task.duration for task in program.tasks)
    assert schedule.busy("compute") <= schedule.makespan <= total


def test_a_payload_is_held_while_it_is_on_its_way():
    program = build(backward(2), Machine(), 2)
    held = [t.memory for t, w in zip(program.tasks, program.works, strict=True) if w.kind == "link"]
    assert sum(held) == 4 * (32 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8)
    assert all(
        t.memory == 0
        for t, w in zip(program.tasks, program.works, strict=True)
        if w.kind == "compute"
    )
