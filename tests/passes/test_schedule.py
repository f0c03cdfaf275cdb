"""The pass `schedule`: it moves what a plan moves, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import TrainingGraph
from fxpasses.passes.schedule import Scheduling, launched, reorder
from fxpasses.registry import parse_pipeline
from fxpasses.schedule.build import build
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.solve import solve
from fxpasses.schedule.tasks import in_order, queued
from fxpasses.testing import run_world
from fxpasses.trace import trace
from tests.graphs import checked, mlp

# What is sent takes about as long as what is computed, and a second leg has to wait for its first.
SLOW = "bandwidth=3000000.0;flops=100000000.0;latency=0.0;collective_s=1e-06"


def traced(world: int, compression: str, layers: int = 10, **options) -> TrainingGraph:
    torch.manual_seed(0)
    model = mlp(*[32] * layers)
    options = {"bucket_mb": 0.008, "compression": compression, **options}
    graphs = trace(lambda x: model(x).square().sum(), (torch.ones(16, 32),), options, world=world)
    return graphs[-1].after


def seconds(graph: TrainingGraph, world: int) -> float:
    tasks = build(graph, Machine.parse(SLOW), world).tasks
    return queued(tasks, in_order(tasks)).makespan


def test_a_second_leg_is_sent_when_its_first_has_arrived():
    graph = traced(4, "int8")
    before, names = seconds(graph, 4), {node.name for node in graph.walk()}
    (done,) = checked(graph, Scheduling(machine=SLOW, world=4))
    assert done.report.changed and done.report.counts["moved"] > 0
    assert seconds(graph, 4) < before
    assert {node.name for node in graph.walk()} == names


def test_the_models_own_computation_keeps_its_order():
    graph = traced(4, "int8")
    own = [
        n.name
        for n in graph.walk()
        if "provenance" not in n.meta and not n.name.startswith("permute")
    ]
    checked(graph, Scheduling(machine=SLOW, world=4))
    kept = [n.name for n in graph.walk() if n.name in set(own)]
    assert [n for n in kept if "mm" in n] == [n for n in own if "mm" in n]


@pytest.mark.parametrize(
    ("world", "compression", "options"),
    [
        (2, "none", {}),
        (2, "int4", {"machine": "bandwidth=1000000000000.0;latency=0.0"}),
        (4, "int8", {"layout": ("0.weight",)}),
    ],
)
def test_what_can_not_be_better_stays_as_it_is(world, compression, options):
    graph = traced(world, compression)
    before = graph.fingerprint()
    (done,) = checked(graph, Scheduling(**{"machine": SLOW, "world": world, **options}))
    assert not done.report.changed and graph.fingerprint() == before


def test_a_graph_that_sends_nothing_stays_as_it_is():
    graph = traced(1, "none")
    assert not Scheduling(world=1).run(graph).changed


def test_results_stay_bitwise_the_same():
    graph = traced(4, "int8")
    moved = graph.copy()
    assert checked(moved, Scheduling(machine=SLOW, world=4))[0].report.changed
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [torch.randn(n.meta["val"].shape, generator=generator) for n, _ in graph.inputs()]
        for _ in range(4)
    ]
    graph.recompile()
    for a, b in zip(run_world(graph, inputs), run_world(moved, inputs), strict=True):
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None]
        assert len(pairs) >= 18 and all(torch.equal(x, y) for x, y in pairs)


def test_a_cap_on_what_is_on_its_way_is_kept():
    graph = traced(4, "int8")
    peak = queued(*_program(graph)).peak_memory
    checked(graph, Scheduling(machine=SLOW, world=4, memory_mb=peak / 2**20))
    assert queued(*_program(graph)).peak_memory <= peak


def test_a_cap_that_nothing_fits_is_an_error():
    with pytest.raises(ValueError, match="at most 10,485 bytes at once; the order given needs"):
        Scheduling(machine=SLOW, world=4, memory_mb=0.01).run(traced(4, "int8"))


def _program(graph: TrainingGraph):
    tasks = build(graph, Machine.parse(SLOW), 4).tasks
    return tasks, in_order(tasks)


def test_launches_stand_in_the_order_in_which_links_begin():
    program = build(traced(4, "int8"), Machine.parse(SLOW), 4)
    links = [i for i, work in enumerate(program.works) if work.kind == "link"]
    order = launched(program, queued(program.tasks, in_order(program.tasks)))
    assert sorted(order) == list(range(len(order)))
    begun = [order.index(i) for i in links]
    assert begun == [order.index(i - 1) + 1 for i in links]


def test_what_the_host_loses_stands_behind_its_launch():
    machine = Machine.parse(f"{SLOW};host_s=1e-07")
    program = build(traced(4, "int8"), machine, 4)
    order = launched(program, solve(program.tasks).schedule)
    assert sorted(order) == list(range(len(program.tasks)))
    place = {i: at for at, i in enumerate(order)}
    sends = [i for i, work in enumerate(program.works) if work.kind == "send"]
    assert sends and all(place[i] == place[i - 1] + 1 == place[i - 2] + 2 for i in sends)


def test_nodes_follow_their_tasks():
    graph = traced(4, "int8")
    program = build(graph, Machine.parse(SLOW), 4)
    names = [node.name for node in graph.graph.nodes]
    reorder(graph, program, range(len(program.tasks)))
    assert [node.name for node in graph.graph.nodes] == names


def test_the_program_that_has_been_planned_is_valid():
    """Each wait behind its launch, each launch behind what it sends, the same order in a second run."""
    graphs = [traced(4, "int4", schedule="auto", machine=SLOW) for _ in range(2)]
    a, b = ([(n.name, n.target) for n in g.walk()] for g in graphs)
    assert a == b
    place = graphs[0].positions()
    for node in graphs[0].walk():
        if is_wait(node) or is_launch(node):
            assert all(place[n] < place[node] for n in node.all_input_nodes)


def test_it_stands_last_and_reads_as_text():
    graph_passes = parse_pipeline("bucketing{mb=1},gradient_sync,schedule{memory_mb=64}")
    assert graph_passes[-1] == Scheduling(memory_mb=64)
    assert Scheduling(machine="flops=1e9").spec == "schedule{machine=flops=1e9}"
    assert parse_pipeline(Scheduling(machine=SLOW).spec) == (Scheduling(machine=SLOW),)
    assert all(a is not b for a, b in itertools.pairwise(graph_passes))
