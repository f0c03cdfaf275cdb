"""When tasks run, and what they hold meanwhile, on task graphs that nobody wrote by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fxpasses.schedule.tasks import Schedule, Task, in_order, needed_memory, queued, timed
from fxpasses.testing import task_graphs
from fxpasses.testing.check import settings
from fxpasses.testing.strategies import SEEDS
from tests.testing.refusals import refusal


def order_of(tasks: Sequence[Task], seed: int) -> list[int]:
    """An order in which they can run."""
    dice, order = random.Random(seed), list[int]()
    while len(order) < len(tasks):
        done = set(order)
        ready = [i for i, t in enumerate(tasks) if i not in done and done.issuperset(t.after)]
        order.append(dice.choice(ready))
    return order


def tasks_as_promised(examples: int) -> None:
    """When each task runs, whatever the order: as soon as what is in front of it lets it."""

    @settings(examples)
    @given(task_graphs(most=12, memory=True), SEEDS, st.integers(0, 4))
    def search(tasks: list[Task], seed: int, room: int) -> None:
        order = order_of(tasks, seed)
        queues = queued(tasks, order)
        _measured(queues)
        place = {i: p for p, i in enumerate(order)}
        for i in order:
            expected = max((queues.ends[j] for j in in_front(tasks, order, i)), default=0.0)
            assert queues.starts[i] == expected
        assert list(queues.order) == sorted(order, key=lambda i: (queues.starts[i], place[i]))
        for share in (0.0, 0.3, 0.7, 1.0):
            _above(queues, int(queues.peak_memory * share))
        _one_by_one(tasks, order, room)

    search()


def in_front(tasks: Sequence[Task], order: Sequence[int], i: int) -> list[int]:
    """What a task comes after, in its order, or on its resource."""
    earlier = order[: order.index(i)]
    return [*tasks[i].after, *(j for j in earlier if tasks[j].resource == tasks[i].resource)]


def _one_by_one(tasks: list[Task], order: list[int], room: int) -> None:
    """None starts before the one in front of it has; with a cap, as soon as there is room."""
    free = timed(tasks, order)
    assert free is not None and free.order == tuple(order)
    for place, i in enumerate(order):
        starts = [free.starts[j] for j in order[:place]]
        expected = max([*starts, *(free.ends[j] for j in in_front(tasks, order, i))], default=0.0)
        assert free.starts[i] == expected
    least = needed_memory(tasks, order)
    assert least == max(_held_at(tasks, order, place) for place in range(len(order)))
    assert timed(tasks, order, sum(t.memory for t in tasks)) == free
    assert least == 0 or timed(tasks, order, least - 1) is None
    cap = least + room
    capped = timed(tasks, order, cap)
    assert capped is not None, "there is room for it"
    _measured(capped)
    assert capped.peak_memory <= cap
    for place, i in enumerate(order):
        starts = [capped.starts[j] for j in order[:place]]
        soonest = max([*starts, *(capped.ends[j] for j in in_front(tasks, order, i))], default=0.0)
        assert capped.starts[i] >= soonest
        if capped.starts[i] > soonest:  # all times are whole: a moment before there was no room
            held = held_then(capped, order[:place], capped.starts[i] - 0.5)
            assert held + tasks[i].memory > cap, f"task {i} could start sooner"


def _held_at(tasks: Sequence[Task], order: Sequence[int], place: int) -> int:
    """Bytes that are held while a task runs, if one runs after the other."""
    ended, current = set(order[:place]), order[place]
    readers = {j: [i for i, t in enumerate(tasks) if j in t.after] for j in ended}
    kept = [j for j in ended if any(i not in ended for i in readers[j])]
    return sum(tasks[j].memory for j in [*kept, current])


def held_then(schedule: Schedule, begun: Sequence[int], now: float) -> int:
    """Bytes that are held at a moment by some of the tasks."""
    tasks, ends = schedule.tasks, schedule.ends
    released = [
        max([ends[j], *(ends[i] for i, t in enumerate(tasks) if j in t.after)])
        for j in range(len(tasks))
    ]
    return sum(tasks[j].memory for j in begun if schedule.starts[j] <= now < released[j])


def _measured(schedule: Schedule) -> None:
    """What a schedule says of itself."""
    tasks, everything = schedule.tasks, range(len(schedule.tasks))
    assert schedule.ends == tuple(schedule.starts[i] + tasks[i].duration for i in everything)
    assert schedule.makespan == max(schedule.ends)
    assert schedule.peak_memory == max(held_then(schedule, everything, t) for t in schedule.starts)
    for resource in {t.resource for t in tasks}:
        assert schedule.busy(resource) == sum(t.duration for t in tasks if t.resource == resource)


def _above(schedule: Schedule, cap: int) -> None:
    """The first task at whose start more is held."""
    everything = range(len(schedule.tasks))
    moments = [t for t in schedule.starts if held_then(schedule, everything, t) > cap]
    found = schedule.first_above(cap)
    assert (found is None) == (not moments)
    assert found is None or schedule.starts[found] == min(moments)


def valid(schedule: Schedule, cap: int | None) -> None:
    """Nothing starts before what it comes after has ended, or beside another on its resource."""
    tasks, starts = schedule.tasks, schedule.starts
    assert sorted(schedule.order) == list(range(len(tasks)))
    assert [starts[i] for i in schedule.order] == sorted(starts)
    for i in schedule.order:
        before = in_front(tasks, schedule.order, i)
        assert starts[i] >= max((schedule.ends[j] for j in before), default=0.0)
    assert cap is None or schedule.peak_memory <= cap


def tasks_that_make_no_sense() -> None:
    """A task that comes after one that is not in front of it; less than nothing."""
    first = Task("first", 1, "x")
    assert in_order([first, Task("next", 0, "x", (0,), 0)]) == range(2)
    for wrong, word in (
        (Task("late", 1, "x", (1,)), "1"),
        (Task("late", 1, "x", (-1,)), "-1"),
        (Task("back", -1.0, "x"), "duration=-1.0"),
        (Task("nan", float("nan"), "x"), "duration=nan"),
        (Task("light", 1.0, "x", (), -5), "memory=-5"),
    ):
        message = refusal(lambda wrong=wrong: in_order([first, wrong]))
        assert repr(wrong.name) in message and word in message


SINGLE: tuple[Any, ...] = (tasks_that_make_no_sense,)
