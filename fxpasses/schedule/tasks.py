"""Tasks, and when each of them runs.

compute   ██ A ██░░ B ░░      A task occupies its resource alone, once all tasks that it comes after have
link:0          ▒▒ C ▒▒       ended. What it holds is held until the last task behind it has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence

COMPUTE, CODEC, LINK = "compute", "codec", "link"


@dataclasses.dataclass(frozen=True)
class Task:
    """Something that takes time.

    Attributes:
        name: for messages and tables.
        duration: seconds, 0 or more.
        resource: what it occupies, alone: `"compute"`, `"codec"`, `"link:<group>"`, or any other word.
        after: positions, in the list that the task is part of, of tasks that must have ended; all smaller
            than its own, so that the list itself is an order in which the tasks can run.
        memory: bytes that are held from its start until the last task that comes after it ends (until its own
            end, where none does).
    """

    name: str
    duration: float
    resource: str
    after: tuple[int, ...] = ()
    memory: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When each task runs.

    Attributes:
        tasks: in the order of the program.
        order: positions of the tasks in the order in which they start.
        starts: seconds, by position.
    """

    tasks: tuple[Task, ...]
    order: tuple[int, ...]
    starts: tuple[float, ...]

    @functools.cached_property
    def ends(self) -> tuple[float, ...]:
        """Seconds, by position."""
        return tuple([s + t.duration for s, t in zip(self.starts, self.tasks, strict=True)])

    @functools.cached_property
    def makespan(self) -> float:
        """When the last task ends, in seconds."""
        return max(self.ends, default=0.0)

    @functools.cached_property
    def peak_memory(self) -> int:
        """The most bytes that are held at once."""
        held = peak = 0
        for _, change, _ in self._changes:
            held += change
            peak = max(peak, held)
        return peak

    def first_above(self, memory_cap: int) -> int | None:
        """Position of the first task at whose start more bytes than that are held."""
        held = 0
        for _, change, i in self._changes:
            held += change
            if held > memory_cap:
                return i
        return None

    @functools.cached_property
    def _changes(self) -> list[tuple[float, int, int]]:
        """(when, by how many bytes, whose) of what is held, in order."""
        released = list(self.ends)
        for i, task in enumerate(self.tasks):
            for j in task.after:
                released[j] = max(released[j], self.ends[i])
        # At one moment what ends makes room before what starts takes it.
        everything = range(len(self.tasks))
        changes = [(self.starts[i], self.tasks[i].memory, i) for i in everything]
        changes += [(released[i], -self.tasks[i].memory, i) for i in everything]
        return sorted(changes)

    def busy(self, resource: str) -> float:
        """Seconds for which a resource is occupied."""
        return sum(t.duration for t in self.tasks if t.resource == resource)


def in_order(tasks: Sequence[Task]) -> range:
    """The order in which the tasks are given.

    Raises:
        ValueError: for a task that comes after one that is not in front of it, or a negative number.
    """
    for i, task in enumerate(tasks):
        late = next((j for j in task.after if not 0 <= j < i), None)
        if late is not None:
            raise ValueError(f"task {i}, {task.name!r}: comes after {late}, not in front of it")
        if not (task.duration >= 0 and task.memory >= 0):
            raise ValueError(
                f"task {i}, {task.name!r}: got duration={task.duration}, memory={task.memory}; "
                "expected 0 or more"
            )
    return range(len(tasks))


def queued(tasks: Sequence[Task], order: Sequence[int]) -> Schedule:
    """Let each resource work off its tasks in an order: one starts when what it comes after, and what stands in
    front of it on its resource, have ended. So runs a program that launches what it sends, and goes on.
    """
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    free: dict[str, float] = {}
    for i in order:
        task = tasks[i]
        start = free.get(task.resource, 0.0)
        for j in task.after:
            if ends[j] > start:
                start = ends[j]
        starts[i], ends[i] = start, start + task.duration
        free[task.resource] = ends[i]
    by_start = sorted(order, key=starts.__getitem__)  # those that start together stay in order
    return Schedule(tuple(tasks), tuple(by_start), tuple(starts))


def timed(
    tasks: Sequence[Task], order: Sequence[int], memory_cap: int | None = None
) -> Schedule | None:
    """Run the tasks in an order: none starts before the one in front of it has started, each as soon as it can.

    Some order gives the shortest schedule there is: run the tasks of any schedule in the order of its starts,
    and none starts later than it did. Queues (`queued`) end no later, but know of no cap on memory.

    Args:
        order: positions of the tasks; each behind those that it comes after.
        memory_cap: bytes that may be held at once. A task waits until there is room for what it holds.

    Returns:
        None where a task would wait for ever for room.
    """
    readers = [0] * len(tasks)
    for task in tasks:
        for j in task.after:
            readers[j] += 1
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    free: dict[str, float] = {}
    releases: list[tuple[float, int]] = []  # (when, bytes) of what will be released
    released = [0.0] * len(tasks)
    now, held = 0.0, 0
    for i in order:
        task = tasks[i]
        now = max(now, free.get(task.resource, 0.0))
        for j in task.after:
            if ends[j] > now:
                now = ends[j]
        if memory_cap is not None:
            while releases and (releases[0][0] <= now or held + task.memory > memory_cap):
                when, size = heapq.heappop(releases)
                now = max(now, when)
                held -= size
            if held + task.memory > memory_cap:
                return None
            held += task.memory
        starts[i], ends[i] = now, now + task.duration
        free[task.resource] = ends[i]
        if memory_cap is not None:
            _release(tasks, i, readers, released, ends[i], releases)
    return Schedule(tuple(tasks), tuple(order), tuple(starts))


def _release(
    tasks: Sequence[Task],
    i: int,
    readers: list[int],
    released: list[float],
    end: float,
    releases: list[tuple[float, int]],
) -> None:
    """Note what is released once the task at `i` has ended."""
    if readers[i] == 0:
        heapq.heappush(releases, (end, tasks[i].memory))
    for j in tasks[i].after:
        readers[j] -= 1
        released[j] = max(released[j], end)
        if readers[j] == 0:
            heapq.heappush(releases, (released[j], tasks[j].memory))


def needed_memory(tasks: Sequence[Task], order: Sequence[int]) -> int:
    """The smallest cap with which an order can run."""
    readers = [0] * len(tasks)
    for task in tasks:
        for j in task.after:
            readers[j] += 1
    held = peak = 0
    for i in order:
        held += tasks[i].memory
        peak = max(peak, held)
        if readers[i] == 0:
            held -= tasks[i].memory
        for j in tasks[i].after:
            readers[j] -= 1
            if readers[j] == 0:
                held -= tasks[j].memory
    return peak
