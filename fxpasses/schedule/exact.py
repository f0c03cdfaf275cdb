"""The best order of a few tasks, with a proof: branch and bound.

    ·─┬─ A ─┬─ A B ─── A B C     makespan 7, the best so far
      │     └─ A C     ✗ what is left can't end before 8
      └─ B ─── ✗

All orders are looked at in which none starts before the one in front of it, but for those that can't end sooner
than the best found so far, that begin with the same tasks as another one, none of which ends sooner, or that
differ in the order of tasks that are alike. What takes neither time nor room, and can be done now, is done now.
Land and Doig, 1960, "An automatic method of solving discrete programming problems".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fxpasses.schedule.tasks import Schedule, Task, timed

_ROUNDING = 1 - 1e-12  # sums of the same numbers in another order differ in their last digits


def best_of_all(
    tasks: tuple[Task, ...],
    best: Schedule | None,
    tails: Sequence[float],
    memory_cap: int | None,
    most: int,
) -> tuple[Schedule | None, bool]:
    """Look through all orders for one that ends before the best that is known, if any is.

    Args:
        tails: seconds behind the end of each task, on the longest path.
        most: how many beginnings of orders may be looked at.

    Returns:
        The best that was found, and whether nothing was left out, so that no order is better.
    """
    kinds = _kinds(tasks)
    beginnings: list[list[int]] = [[]]
    seen: dict[
        frozenset[int], list[list[float]]
    ] = {}  # by tasks of a beginning: how it leaves things
    while beginnings and most > 0:
        most -= 1
        order = beginnings.pop()
        tried = timed(tasks, order, memory_cap)
        known = math.inf if best is None else best.makespan
        if tried is None or _soonest_end(tried) >= known * _ROUNDING:
            continue
        left, others = _left(tried), seen.setdefault(frozenset(order), [])
        if any(all(a <= b for a, b in zip(other, left, strict=True)) for other in others):
            continue
        others.append(left)
        if len(order) == len(tasks):
            best = tried
            continue
        ready = {
            kinds[i]: i
            for i, task in enumerate(tasks)
            if i not in order and all(j in order for j in task.after)
        }
        for i in _costs_nothing(tried, ready.values()):
            ready = {kinds[i]: i}
        beginnings += [[*order, i] for i in sorted(ready.values(), key=lambda i: tails[i])]
    return best, not beginnings


def _kinds(tasks: Sequence[Task]) -> list[object]:
    """Equal for tasks that can change places in any order."""
    readers: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for j in task.after:
            readers[j].append(i)
    return [
        (t.duration, t.resource, t.memory, tuple(sorted(t.after)), tuple(own))
        for t, own in zip(tasks, readers, strict=True)
    ]


def _costs_nothing(begun: Schedule, ready: Iterable[int]) -> Iterator[int]:
    """Of these tasks those that end at once, if they come next."""
    tasks, now = begun.tasks, _now(begun)
    free = {tasks[i].resource: begun.ends[i] for i in begun.order}
    for i in ready:
        task = tasks[i]
        starts = max((free.get(task.resource, 0.0), *(begun.ends[j] for j in task.after)))
        if task.duration == task.memory == 0 and starts <= now:
            yield i


def _now(begun: Schedule) -> float:
    return begun.starts[begun.order[-1]] if begun.order else 0.0


def _left(begun: Schedule) -> list[float]:
    """When another task may start at the soonest, and until when each of those that have started runs."""
    now = _now(begun)
    return [now, *(max(now, begun.ends[i]) for i in sorted(begun.order))]


def _soonest_end(begun: Schedule) -> float:
    """Seconds before which no schedule that begins like this ends."""
    tasks, placed = begun.tasks, set(begun.order)
    now = _now(begun)
    ends, free = [0.0] * len(tasks), {}
    for i in begun.order:
        ends[i] = free[tasks[i].resource] = begun.starts[i] + tasks[i].duration
    soonest = max((ends[i] for i in placed), default=0.0)
    first: dict[str, float] = {}
    work: dict[str, float] = {}
    for i, task in enumerate(tasks):
        if i in placed:
            continue
        start = max(now, free.get(task.resource, 0.0), *(ends[j] for j in task.after), 0.0)
        ends[i] = start + task.duration
        soonest = max(soonest, ends[i])
        first[task.resource] = min(first.get(task.resource, start), start)
        work[task.resource] = work.get(task.resource, 0.0) + task.duration
    return max([soonest, *(first[resource] + work[resource] for resource in work)])
