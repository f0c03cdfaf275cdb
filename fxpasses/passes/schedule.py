"""Put second legs, waits and decodings where a plan wants them, among the computation and among each other.

    before   A, launch 0, B, launch 1, wait 0, recode 0, relaunch 0, C, …, wait 0, decode 0, wait 1, decode 1
    after    A, launch 0, B, launch 1, C, wait 0, recode 0, relaunch 0, …, wait 1, decode 1, wait 0, decode 0

Before: the graph that all other passes have made. After: the same nodes in another order, so that the step
that the cost model predicts is as short as the scheduler finds (`fxpasses.schedule`), and never longer than
before; of two orders that take equally long, the one that waits later. The model's own computation, and what it
sends itself, keeps its order. Where the order that is there is as good, the graph stays as it is.

Every rank plans for itself, with nothing but its graph and the same rates. Where ranks' graphs differ, and so
could their plans, they send in an order that they agreed on, and this pass does nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

from torch import fx

from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.schedule.build import LAUNCH, SEND, WAIT, Program, build
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.tasks import CODEC, LINK, Schedule, queued

_WORTH_IT = 1e-3  # of the step, to move anything: no prediction is better than that


@dataclasses.dataclass(frozen=True)
class Scheduling(Pass):
    """Options: `machine`, rates to plan with (`flops=8e10;bandwidth=1e8`); `memory_mb`, the most MiB of buckets
    that may be on their way at once. Environment: `world`; `layout`, whether ranks' graphs differ.
    """

    machine: str | None = from_environment("machine")
    memory_mb: float | None = None
    world: int | None = from_environment("world")
    layout: tuple[str, ...] | None = from_environment("layout")

    name: ClassVar[str] = "schedule"
    stage: ClassVar[str] = "backward"
    reorders: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Machine.parse(self.machine)

    def run(self, graph: TrainingGraph) -> Report:
        if self.layout is not None:
            return Report(changed=False)
        program = self._program(graph)
        cap = None if self.memory_mb is None else int(self.memory_mb * 2**20)
        before = list(graph.graph.nodes)
        if any(work.kind == WAIT for work in program.works):
            order = self._order(program, cap)
            if list(order) != list(range(len(order))):
                reorder(graph, program, order)
            if cap is not None:
                keep_below(cap, graph, before, program, self._program(graph))
        moved = sum(a is not b for a, b in zip(before, graph.graph.nodes, strict=True))
        return Report(changed=bool(moved), counts={"tasks": len(program.tasks), "moved": moved})

    def _program(self, graph: TrainingGraph) -> Program:
        assert self.world is not None
        return build(graph, Machine.parse(self.machine), self.world)

    def _order(self, program: Program, cap: int | None) -> Sequence[int]:
        from fxpasses.schedule.solve import postponed, solve

        as_it_is = range(len(program.tasks))
        best = solve(program.tasks, cap).schedule
        late = [i for i, work in enumerate(program.works) if work.kind in (WAIT, CODEC)]
        order = launched(program, postponed(best, late, cap))
        if cap is not None:
            order = held_back(program, order, cap)
        before, after = _as_it_is(program), queued(program.tasks, order)
        better = after.makespan < before.makespan * (1 - _WORTH_IT)
        if cap is None:
            return order if better else as_it_is
        keeps = after.peak_memory <= cap
        return order if keeps and (better or before.peak_memory > cap) else as_it_is


def _as_it_is(program: Program) -> Schedule:
    return queued(program.tasks, range(len(program.tasks)))


def launched(program: Program, schedule: Schedule) -> list[int]:
    """The order of a schedule as a program can have it: a link begins with its launch, and serves one after the
    other, so launches stand in the order in which links are to begin; behind each what the host loses by it.
    """
    order: list[int] = []
    begins = [i - 1 for i in schedule.order if program.works[i].kind == LINK]  # their launches
    ready: set[int] = set()
    for i in schedule.order:
        if program.works[i].kind == LAUNCH:
            ready.add(i)
            while begins and begins[0] in ready:
                launch = begins.pop(0)
                order += [launch, launch + 1]
                behind = program.works[launch + 2 : launch + 3]
                order += [launch + 2 for work in behind if work.kind == SEND]
        elif program.works[i].kind not in (LINK, SEND):
            order.append(i)
    return order


def held_back(program: Program, order: Sequence[int], memory_cap: int) -> list[int]:
    """The order with waits so early that no more is held at once, if that helps. A plan may let a task wait for
    room; a program goes on behind a launch, whatever is on its way, and stops at waits alone.
    """
    found = list(order)
    while (above := queued(program.tasks, found).first_above(memory_cap)) is not None:
        # A link stands behind its launch.
        place = found.index(above) - (program.works[above].kind == LINK)
        launched_before = set(found[:place])
        waits = (
            at
            for at in range(place, len(found))
            if program.works[found[at]].kind == WAIT
            and launched_before.issuperset(program.tasks[found[at]].after)
        )
        at = next(waits, None)
        if at is None:
            break
        found.insert(place, found.pop(at))
    return found


def keep_below(
    memory_cap: int,
    graph: TrainingGraph,
    nodes_before: Sequence[fx.Node],
    before: Program,
    after: Program,
) -> None:
    """Put the nodes back where more is held than may be: those that have become neighbours run as one kernel,
    which holds what both make.

    Raises:
        ValueError: where that is too much as well.
    """
    if _as_it_is(after).peak_memory <= memory_cap:
        return
    _arrange(graph, nodes_before)
    given = _as_it_is(before).peak_memory
    if given > memory_cap:
        raise ValueError(
            f"no order was found that holds at most {memory_cap:,} bytes at once; the order given needs "
            f"{given:,}"
        )


def reorder(graph: TrainingGraph, program: Program, order: Sequence[int]) -> None:
    """Let the nodes of tasks stand in the order of the tasks. A view, which belongs to none, goes with the task
    behind it; where what it reads is not there yet, it stands in front of what reads it.
    """
    task_of = {node: i for i, work in enumerate(program.works) for node in work.nodes}
    following: dict[int, list[fx.Node]] = {i: [] for i in (*order, len(order))}
    task = len(order)
    inside = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    for node in reversed(inside):
        task = task_of.get(node, task)
        following[task].append(node)
    placed = dict.fromkeys(node for node in graph.graph.nodes if node.op == "placeholder")
    for i in order:
        for node in reversed(following[i]):
            if node in task_of or placed.keys() >= set(node.all_input_nodes):
                _place(node, placed)
    for node in inside:
        _place(node, placed)
    _arrange(graph, placed)


def _arrange(graph: TrainingGraph, nodes: Iterable[fx.Node]) -> None:
    """Let nodes stand in this order, inputs first."""
    for node in nodes:
        if node is not graph.output_node:
            graph.output_node.prepend(node)


def _place(node: fx.Node, placed: dict[fx.Node, None]) -> None:
    """Put a node behind those that have a place, and in front of it what it reads and has none."""
    pending = [node]
    while pending:
        missing = [n for n in pending[-1].all_input_nodes if n not in placed]
        if missing:
            pending += missing
        else:
            placed[pending.pop()] = None
