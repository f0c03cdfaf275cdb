"""What a step will take: the tasks of its graphs, when each runs, and what of the communication is exposed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

from fxpasses.config import Hardening
from fxpasses.distributed.fake import fake_world
from fxpasses.distributed.group import resolve
from fxpasses.graph import TrainingGraph, ancestors, copied
from fxpasses.pipeline import build as build_pipeline
from fxpasses.schedule.build import LAUNCH, WAIT, Program, Work, build
from fxpasses.schedule.choose import choose
from fxpasses.schedule.cost import (
    Cost,
    Transfer,
    bytes_of,
    closed_form,
    evaluated,
    seconds,
    sizes_of,
)
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.solve import lower_bound_of
from fxpasses.schedule.tasks import COMPUTE, LINK, Schedule, Task, in_order, queued
from fxpasses.trace import TracedGraph


@dataclasses.dataclass(frozen=True)
class BucketRow:
    """One bucket of the overlap table; times in seconds.

    Attributes:
        number: in the order of launches.
        parameters: whose gradients it holds.
        gradient_bytes: of its gradients.
        sent_bytes: that a rank sends for it.
        dense_bytes: that a rank would send if it were all-reduced as it is.
        available: computing that the host does while it is on its way.
        needed: from its launch to its arrival, behind the buckets in front of it, both legs.
        exposed: for which the host stands still for it.
    """

    number: int
    parameters: tuple[str, ...]
    gradient_bytes: int
    sent_bytes: float
    dense_bytes: float
    available: float
    needed: float
    exposed: float

    @property
    def ratio(self) -> float:
        """How many times less is sent than if it were all-reduced as it is."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @property
    def feasible(self) -> bool:
        """Whether all of it is hidden; a thousandth is not seen."""
        return self.exposed <= 1e-3 * self.needed

    @property
    def advice(self) -> str:
        """What would hide it."""
        if self.feasible:
            return ""
        share = self.available / self.needed
        if share < 0.02:
            return "nothing is left to hide it: make the last bucket smaller"
        bits = 8 * self.sent_bytes / self.dense_bytes * 4 * share
        return (
            f"send {1 / share:.1f} times less ({bits:.1f} bits an element), or later buckets less"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step of one rank.

    Attributes:
        world: number of ranks.
        machine: what times were computed with.
        program: its tasks, forwards first.
        schedule: when they run, in the order that the graphs have.
        bound: seconds that no order of these tasks can beat.
        buckets: the overlap table.
        memory: bytes, by what they are for.
        form: the sum of all costs in symbols.
    """

    world: int
    machine: Machine
    program: Program
    schedule: Schedule
    bound: float
    buckets: tuple[BucketRow, ...]
    memory: Mapping[str, int]
    form: sympy.Expr

    @property
    def step_s(self) -> float:
        return self.schedule.makespan

    @property
    def busy_s(self) -> Mapping[str, float]:
        """Seconds by track."""
        found = {"compute": 0.0, "codec": 0.0, "link": 0.0}
        for work, task in zip(self.program.works, self.program.tasks, strict=True):
            found[work.track] += task.duration
        return found

    @property
    def exposed_s(self) -> float:
        """For which the host stands still: communication that nothing hides."""
        busy = self.busy_s
        return max(0.0, self.step_s - busy["compute"] - busy["codec"])

    def data(self) -> dict[str, Any]:
        """As plain data, for JSON; seconds and bytes."""
        return {
            "world": self.world,
            "step_s": self.step_s,
            "bound_s": self.bound,
            "exposed_s": self.exposed_s,
            "busy_s": dict(self.busy_s),
            "memory": dict(self.memory),
            "machine": dataclasses.asdict(self.machine),
            "closed_form": str(self.form),
            "buckets": [
                dataclasses.asdict(row)
                | {"ratio": row.ratio, "feasible": row.feasible, "advice": row.advice}
                for row in self.buckets
            ],
        }


def plan_step(graphs: Sequence[TracedGraph], machine: Machine, world: int) -> Plan:
    """The plan of a program, from the graphs that `fxpasses.trace.trace` found for that number of ranks."""
    joints, backwards = ([g.after for g in _of(graphs, kind)] for kind in ("joint", "backward"))
    return _plan(joints, backwards, machine, world)


def at_other_worlds(
    graphs: Sequence[TracedGraph],
    options: Mapping[str, Any],
    machine: Machine,
    worlds: Iterable[int],
) -> Iterable[Plan]:
    """The same program's plans for other numbers of ranks, without tracing it again.

    Args:
        options: those of the backend that the graphs were traced with.
    """
    hardening = Hardening.from_options(options)
    joints = [g.after for g in _of(graphs, "joint")]
    for world in worlds:
        backwards = []
        with fake_world(world):
            group = resolve(None)
            pipeline = build_pipeline(hardening, group.name, group.size, group.rank)
            for one in _of(graphs, "backward"):
                graph = TrainingGraph(copied(one.before.module), one.before.decompositions)
                choose(pipeline, graph, hardening, world).run("backward", graph)
                backwards.append(graph)
        yield _plan(joints, backwards, machine, world)


def _of(graphs: Iterable[TracedGraph], kind: str) -> list[TracedGraph]:
    return [graph for graph in graphs if graph.name.graph == kind]


def _plan(
    joints: Sequence[TrainingGraph],
    backwards: Sequence[TrainingGraph],
    machine: Machine,
    world: int,
) -> Plan:
    if not backwards:
        raise ValueError("the program records no backward, so there is nothing to plan")
    forwards = [forward_of(joint, machine, world) for joint in joints]
    agreement = _agreement(machine, world)
    parts = [[agreement, build(graph, machine, world)] for graph in reversed(backwards)]
    program = _one_after_the_other([*forwards, *itertools.chain(*parts)])
    schedule = queued(program.tasks, in_order(program.tasks))
    return Plan(
        world,
        machine,
        program,
        schedule,
        lower_bound_of(program.tasks),
        tuple(_buckets(program, schedule, world)),
        _memory(joints, backwards, schedule),
        closed_form(work.cost for work in program.works),
    )


def forward_of(joint: TrainingGraph, machine: Machine, world: int) -> Program:
    """The tasks of the forward: what its outputs need. None for a whole step, whose backward holds it."""
    if not joint.inputs("tangent"):
        return Program((), ())
    outputs = [n for kind in ("output", "mutation") for _, n, _ in joint.outputs(kind)]
    needed = ancestors(n for n in outputs if isinstance(n, torch.fx.Node))
    return build(joint, machine, world, only=needed)


def _agreement(machine: Machine, world: int) -> Program:
    """The all-reduce of four integers in front of each backward, which is no part of its graph."""
    if world == 1:
        return Program((), ())
    sent = Transfer("all_reduce", 4 * 8)
    works = (Work(LAUNCH, (), Cost(launches=1)), Work(LINK, (), sent), Work(WAIT, (), Cost()))
    resources = (COMPUTE, f"{LINK}:agreement", COMPUTE)
    return Program(
        works,
        tuple(
            Task("agreement", seconds(work.cost, machine, world), resource, (i - 1,) if i else ())
            for i, (work, resource) in enumerate(zip(works, resources, strict=True))
        ),
    )


def _one_after_the_other(programs: Sequence[Program]) -> Program:
    works: list[Any] = []
    tasks: list[Task] = []
    for program in programs:
        offset = len(tasks)
        behind = (offset - 1,) if offset else ()
        works += program.works
        tasks += [
            dataclasses.replace(task, after=tuple(j + offset for j in task.after) or behind)
            for task in program.tasks
        ]
    return Program(tuple(works), tuple(tasks))


def _buckets(program: Program, schedule: Schedule, world: int) -> Iterable[BucketRow]:
    blocked = _blocked(program, schedule)
    links: dict[tuple[str, ...], list[int]] = {}
    for i in schedule.order:
        if program.works[i].kind == LINK and program.works[i].bucket:
            links.setdefault(program.works[i].bucket, []).append(i)
    wait_of = {
        task.after[0]: i for i, task in enumerate(program.tasks) if program.works[i].kind == WAIT
    }
    for number, (bucket, own) in enumerate(links.items()):
        launched = [schedule.ends[i - 1] for i in own]  # the launch stands in front of its link
        arrived = [schedule.ends[i] for i in own]
        exposed = [blocked.get(wait_of.get(i, -1), 0.0) for i in own]
        needed = sum(b - a for a, b in zip(launched, arrived, strict=True))
        size = _gradient_bytes(program, bucket)
        yield BucketRow(
            number,
            bucket,
            size,
            float(sum(program.works[i].cost.volume(world) for i in own)),  # type: ignore[union-attr]
            2 * (world - 1) / world * size,
            needed - sum(exposed),
            needed,
            sum(exposed),
        )


def _gradient_bytes(program: Program, bucket: tuple[str, ...]) -> int:
    """Of the flat tensor that is filled with a bucket's gradients."""
    for work in program.works:
        if work.bucket == bucket:
            for node in work.nodes:
                if node.meta["provenance"].rule in ("flatten", "launch"):
                    return int(bytes_of(work.nodes[-1]))
    return 0


def _blocked(program: Program, schedule: Schedule) -> dict[int, float]:
    """For each wait how long the host stands still."""
    found, host = {}, 0.0
    for i in schedule.order:
        kind = program.works[i].kind
        if kind == WAIT:
            found[i] = schedule.starts[i] - host
        if kind != LINK:
            host = schedule.ends[i]
    return found


def _memory(
    joints: Sequence[TrainingGraph], backwards: Sequence[TrainingGraph], schedule: Schedule
) -> dict[str, int]:
    """Bytes of what a rank holds around and in its backwards."""
    found = {"parameters": 0, "saved": 0, "state": 0, "gradients": 0}
    inputs: set[str] = set()
    for graph in joints:
        sizes = sizes_of(graph.graph)
        inputs |= {node.name for node, _ in graph.inputs()}
        for node, _ in graph.inputs("parameter"):
            found["parameters"] += int(evaluated(bytes_of(node), sizes))
    for graph in backwards:
        sizes = sizes_of(graph.graph)
        for node, role in graph.inputs():
            if role.kind in ("saved", "state") and node.name not in inputs:
                found[role.kind] += int(evaluated(bytes_of(node), sizes))
        for gradient in graph.gradients():
            found["gradients"] += int(evaluated(bytes_of(gradient.node), sizes))
    return {**found, "in flight": schedule.peak_memory}
