"""Timing tasks in an order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.schedule.tasks import Schedule, Task, in_order, needed_memory, queued, timed
from fxpasses.testing import task_graphs

CHAIN = [
    Task("a", 2, "compute", (), 10),
    Task("send a", 3, "link:0", (0,), 5),
    Task("b", 4, "compute", (0,)),
    Task("use a", 1, "compute", (1,)),
]


def check(schedule: Schedule, memory_cap: float | None = None) -> None:
    """That nothing starts too soon, runs beside another on its resource, or finds no room."""
    tasks, starts, ends = schedule.tasks, schedule.starts, schedule.ends
    assert sorted(schedule.order) == list(range(len(tasks)))
    for i, task in enumerate(tasks):
        assert starts[i] >= max((ends[j] for j in task.after), default=0.0)
    last: dict[str, float] = {}
    now = 0.0
    for i in schedule.order:
        assert starts[i] >= now
        assert starts[i] >= last.get(tasks[i].resource, 0.0)
        now, last[tasks[i].resource] = starts[i], ends[i]
    if memory_cap is not None:
        assert schedule.peak_memory <= memory_cap


def test_what_is_sent_runs_beside_what_is_computed():
    schedule = timed(CHAIN, range(4))
    assert schedule is not None
    assert schedule.starts == (0, 2, 2, 6)
    assert (schedule.makespan, schedule.busy("compute"), schedule.busy("link:0")) == (7, 7, 3)


def test_an_order_decides_what_runs_first():
    schedule = timed(CHAIN, [0, 1, 3, 2])
    assert schedule is not None
    assert schedule.starts == (0, 2, 6, 5) and schedule.makespan == 10


def test_memory_is_held_until_the_last_reader_ends():
    schedule = timed(CHAIN, range(4))
    assert schedule is not None
    assert schedule.peak_memory == 15  # `a` until `b` ends, and what is sent


def test_a_task_waits_for_room():
    tasks = [Task("a", 2, "x", (), 10), Task("b", 1, "y", (), 10), Task("c", 5, "x", (0,))]
    without, capped = timed(tasks, range(3)), timed(tasks, range(3), memory_cap=15)
    assert without is not None and without.starts == (0, 0, 2)
    assert capped is None  # `a` is held until `c` ends, which starts no sooner than `b`
    assert needed_memory(tasks, range(3)) == 20
    other = timed(tasks, [0, 2, 1], memory_cap=15)
    assert other is not None and other.starts == (0, 7, 2)
    assert needed_memory(tasks, [0, 2, 1]) == 10


@given(task_graphs(most=20, memory=True))
def test_the_order_given_keeps_all_rules(tasks):
    schedule, queues = timed(tasks, in_order(tasks)), queued(tasks, in_order(tasks))
    assert schedule is not None
    check(schedule)
    check(queues)
    assert queues.makespan <= schedule.makespan
    again = timed(tasks, queues.order)
    assert again is not None and again.starts == queues.starts


def test_a_launch_does_not_wait_for_the_link_to_be_free():
    tasks = [
        Task("send a", 5, "link:0"),
        Task("send b", 5, "link:0"),
        Task("compute", 3, "compute"),
    ]
    assert queued(tasks, range(3)).starts == (0, 5, 0)
    waiting = timed(tasks, range(3))
    assert waiting is not None and waiting.starts == (0, 5, 5)


@given(task_graphs(most=20, memory=True), st.integers(0, 30))
def test_an_order_runs_exactly_if_there_is_room_for_it(tasks, cap):
    schedule = timed(tasks, in_order(tasks), cap)
    assert (schedule is not None) == (needed_memory(tasks, in_order(tasks)) <= cap)
    if schedule is not None:
        check(schedule, cap)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task("late", 1, "x", (1,)), "comes after 1, not in front of it"),
        (Task("back", -1.0, "x"), "duration=-1.0"),
        (Task("nan", float("nan"), "x"), "duration=nan"),
    ],
)
def test_tasks_that_make_no_sense_are_refused(task, message):
    with pytest.raises(ValueError, match=message):
        in_order([Task("first", 1, "x"), task])
