"""Large task graphs, job shops, and the optimum of small ones by trying everything."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from fxpasses.schedule.tasks import Task


def random_tasks(count: int, seed: int, resources: int, links: int) -> list[Task]:
    """Each comes after at most `links` of the 50 in front of it."""
    dice = random.Random(seed)
    tasks = []
    for i in range(count):
        near = range(max(0, i - 50), i)
        after = dice.sample(near, min(len(near), dice.randint(0, links)))
        resource = f"r{dice.randrange(resources)}"
        tasks.append(
            Task(f"t{i}", dice.random(), resource, tuple(sorted(after)), dice.randrange(100))
        )
    return tasks


def job_shop(jobs: int, machines: int, seed: int) -> list[Task]:
    """Jobs that visit each machine once, in an order of their own: lists seldom find the best order of them."""
    dice = random.Random(seed)
    ways = [dice.sample(range(machines), machines) for _ in range(jobs)]
    turns = [job for job in range(jobs) for _ in range(machines)]
    dice.shuffle(turns)
    tasks: list[Task] = []
    last: dict[int, int] = {}
    for job in turns:
        machine, after = ways[job].pop(), (last[job],) if job in last else ()
        last[job] = len(tasks)
        seconds, memory = dice.randint(1, 12), dice.randint(0, 4)
        tasks.append(Task(f"job{job}:{machine}", seconds, f"m{machine}", after, memory))
    return tasks


def job_shops(jobs: int, machines: int) -> st.SearchStrategy[list[Task]]:
    """Up to so many, of whole seconds."""
    return st.builds(
        job_shop, st.integers(2, jobs), st.integers(1, machines), st.integers(0, 2**16)
    )


def optimum(tasks: list[Task], memory_cap: int, known: float) -> float:
    """The shortest makespan, no longer than one that is known.

    Tries, at each moment at which a task may end, every set of tasks that could start then: an optimal schedule
    needs no other moments. What leads to no better end, or was reached sooner before, is left.
    """
    count = len(tasks)
    behind = [[i for i in range(count) if j in tasks[i].after] for j in range(count)]
    far = [0.0] * count
    for i in reversed(range(count)):
        far[i] = tasks[i].duration + max((far[k] for k in behind[i]), default=0.0)
    best = known
    seen: dict[tuple, float] = {}

    def held(done: frozenset[int], running: dict[int, float]) -> int:
        kept = [j for j in done if any(k not in done for k in behind[j])]
        return sum(tasks[j].memory for j in [*kept, *running])

    def visit(now: float, done: frozenset[int], running: dict[int, float], least: int) -> None:
        """`running`: when each ends. `least`: tasks with smaller numbers don't start at this moment."""
        nonlocal best
        if len(done) == count:
            best = min(best, now)
            return
        waiting = [i for i in range(count) if i not in done and i not in running]
        loads: dict[str, float] = {}
        for i in waiting:
            loads[tasks[i].resource] = loads.get(tasks[i].resource, 0.0) + tasks[i].duration
        for i, end in running.items():
            loads[tasks[i].resource] = loads.get(tasks[i].resource, 0.0) + end - now
        ends = [end + far[i] - tasks[i].duration for i, end in running.items()]
        if (
            max([*ends, *(now + far[i] for i in waiting), *(now + x for x in loads.values())])
            >= best
        ):
            return
        key = (done, tuple(sorted((i, end - now) for i, end in running.items())), least)
        if seen.get(key, float("inf")) <= now:
            return
        seen[key] = now
        busy = {tasks[i].resource for i in running}
        used = held(done, running)
        for i in waiting:
            ready = i >= least and all(j in done for j in tasks[i].after)
            if ready and tasks[i].resource not in busy and used + tasks[i].memory <= memory_cap:
                visit(now, done, {**running, i: now + tasks[i].duration}, i + 1)
        if running:
            now = min(running.values())
            ended = {i for i, end in running.items() if end == now}
            visit(now, done | ended, {i: e for i, e in running.items() if i not in ended}, 0)

    visit(0.0, frozenset(), {}, 0)
    return best
