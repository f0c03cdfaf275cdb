"""All orders of a few tasks: the optimum, with or without a cap on memory, and what it says of it."""

from __future__ import annotations

import sys

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpasses.schedule.exact import best_of_all
from fxpasses.schedule.solve import solve
from fxpasses.schedule.tasks import Task, in_order, needed_memory, timed
from fxpasses.testing import task_graphs
from tests.schedule.task_graphs import optimum
from tests.schedule.test_tasks import check

SLOW = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
WAITS = [
    Task("other", 4, "compute"),
    Task("gradient", 2, "compute"),
    Task("send", 5, "link:0", (1,)),
]
TAILS = [0, 5, 0]


def as_given(tasks, cap=None):
    schedule = timed(tasks, in_order(tasks), cap)
    assert schedule is not None
    return schedule


def tails(tasks):
    found = [0.0] * len(tasks)
    for i in reversed(range(len(tasks))):
        for j in tasks[i].after:
            found[j] = max(found[j], tasks[i].duration + found[i])
    return found


def test_a_better_order_is_found_and_proven():
    best, proven = best_of_all(tuple(WAITS), as_given(WAITS), TAILS, None, most=100)
    assert (best.makespan, proven) == (7, True)
    assert best.order.index(1) < best.order.index(0)


def test_what_was_given_comes_back_where_nothing_is_better():
    given_first = as_given([WAITS[1], WAITS[0], Task("send", 5, "link:0", (0,))])
    assert best_of_all(given_first.tasks, given_first, [5, 0, 0], None, most=100) == (
        given_first,
        True,
    )


def test_what_was_not_looked_at_is_no_proof():
    schedule = as_given(WAITS)
    assert best_of_all(schedule.tasks, schedule, TAILS, None, most=1) == (schedule, False)


@SLOW
@given(task_graphs(most=10, memory=True), st.booleans())
def test_it_is_the_optimum(tasks, capped):
    cap = needed_memory(tasks, in_order(tasks)) if capped else None
    best, proven = best_of_all(tuple(tasks), as_given(tasks, cap), tails(tasks), cap, most=10_000)
    check(best, cap)
    assert proven
    assert best.makespan == optimum(tasks, cap or sys.maxsize, as_given(tasks, cap).makespan)


@SLOW
@given(task_graphs(most=12, memory=True))
def test_a_solution_of_few_tasks_is_proven(tasks):
    cap = needed_memory(tasks, in_order(tasks))
    assert solve(tasks, cap).gap == solve(tasks).gap == 0
