"""The order of tasks that ends first: resource-constrained scheduling with a cap on memory.

    bounds          what no order can beat: the critical path, and what each resource has to do
    list schedules  by several priorities, and the order that was given: the best of them
    all orders      of a few tasks, with proof (`exact.py`)
    improvement     of more: simulated annealing over orders, until the bound is reached

All of it is deterministic, and no decision depends on a clock: every rank comes to the same order.

List schedules: Kolisch and Hartmann, 1999, "Heuristic algorithms for the resource-constrained project
scheduling problem". The bound of one resource is Jackson's preemptive schedule (Carlier and Pinson, 1989).
Annealing by exchanging critical neighbours: van Laarhoven et al., 1992, "Job shop scheduling by simulated
annealing".
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Sequence

import networkx as nx

from fxpasses.schedule.exact import best_of_all
from fxpasses.schedule.tasks import Schedule, Task, in_order, needed_memory, queued, timed

# Placements of single tasks that may be tried: some tenths of a second.
PLACEMENTS = 200_000
_FEW = 16  # tasks of which all orders are looked through
_MOST_ROUNDS, _FEWEST_ROUNDS = 10_000, 50  # with fewer, nothing cools down
# Of the annealing: the first temperature as a share of the makespan, how often it cools down, and the share of
# moves that exchange critical neighbours. Chosen on random graphs of 20 to 40 tasks whose optimum is known.
_WARMTH, _CYCLES, _CRITICAL = 0.1, 2, 0.8
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Solution:
    """An order, and how good it is.

    Attributes:
        schedule: the best that was found.
        bound: seconds; no schedule of these tasks, under the cap on memory, ends sooner.
        given: the makespan of the order that was given, in seconds; under a cap, of that or of one that holds
            less, and infinite where neither fits.
    """

    schedule: Schedule
    bound: float
    given: float

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a share of it; 0 is proof that nothing is better."""
        return self.schedule.makespan / self.bound - 1 if self.bound else 0.0


def solve(
    tasks: Sequence[Task], memory_cap: int | None = None, placements: int = PLACEMENTS
) -> Solution:
    """Find an order that ends early; never later than the one that is given.

    Args:
        tasks: in an order in which they can run.
        memory_cap: bytes that may be held at once.
        placements: how many placements of single tasks may be tried.

    Raises:
        ValueError: for tasks that are not in such an order, or a cap that no order was found for.
    """
    order = in_order(tasks)
    heads, tails = _heads(tasks), _tails(tasks)
    bound = lower_bound(tasks, heads, tails)
    as_given = queued(tasks, order)
    orders = [] if memory_cap is None else [as_given.order, order, _frugal(tasks)]
    capped = [timed(tasks, o, memory_cap) for o in orders] or [as_given]
    found = [schedule for schedule in capped if schedule is not None]
    given = min((schedule.makespan for schedule in found), default=math.inf)
    for priority in _priorities(tasks, heads, tails):
        if any(_reaches(s, bound) for s in found):
            break
        listed = list_schedule(tasks, priority, memory_cap)
        found += [listed] if listed is not None else []
    best = min(found, key=lambda s: s.makespan, default=None)  # the first, where several are equal
    proven = best is not None and _reaches(best, bound)
    if not proven and len(tasks) <= _FEW:
        most = placements // len(tasks)
        best, proven = best_of_all(as_given.tasks, best, tails, memory_cap, most)
    if best is None:
        raise ValueError(
            f"no order was found that holds at most {memory_cap:,} bytes at once; the order given needs "
            f"{needed_memory(tasks, order):,}"
        )
    if not proven:
        best = _improved(best, bound, memory_cap, placements)
    return Solution(best, best.makespan if proven else min(bound, best.makespan), given)


def postponed(schedule: Schedule, which: Sequence[int], memory_cap: int | None = None) -> Schedule:
    """Let some tasks start as late as costs nothing: a plan is a guess, and what is awaited later is waited for
    less if it comes later than planned.

    Args:
        which: positions of the tasks: all of them, or else the two halves, and so on.
    """
    chosen = set(which)
    order = _last_moment(schedule.tasks, schedule.order, chosen)
    if memory_cap is None:
        tried: Schedule | None = queued(schedule.tasks, order)
    else:
        tried = timed(schedule.tasks, order, memory_cap)
    if tried is not None and tried.makespan <= schedule.makespan * (1 + 1e-12):
        return tried
    if len(chosen) < 2:
        return schedule
    place = {i: p for p, i in enumerate(schedule.order)}
    late = sorted(chosen, key=place.__getitem__)
    middle = len(late) // 2
    return postponed(postponed(schedule, late[middle:], memory_cap), late[:middle], memory_cap)


def _last_moment(tasks: Sequence[Task], order: Sequence[int], chosen: set[int]) -> list[int]:
    """The order with each chosen task right in front of the first one that comes after it."""
    left = [0] * len(tasks)
    for task in tasks:
        for j in task.after:
            left[j] += 1
    found: list[int] = []  # from the end on
    for start in [*(i for i in reversed(order) if i in chosen and not left[i]), *reversed(order)]:
        pending = [start]
        while pending:
            i = pending.pop()
            if left[i] < 0:
                continue  # stands there already
            found.append(i)
            left[i] = -1
            for j in sorted(tasks[i].after):
                left[j] -= 1
                if j in chosen and left[j] == 0:
                    pending.append(j)
    return found[::-1]


def critical_path(tasks: Sequence[Task]) -> list[int]:
    """Positions of the tasks on the longest path of dependencies, in order."""
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(
        (j, i, tasks[j].duration) for i, task in enumerate(tasks) for j in task.after
    )
    end = -1
    graph.add_weighted_edges_from((i, end, task.duration) for i, task in enumerate(tasks))
    return [i for i in nx.dag_longest_path(graph) if i >= 0]


def lower_bound_of(tasks: Sequence[Task]) -> float:
    """Seconds that no order of these tasks can beat."""
    return lower_bound(tasks, _heads(tasks), _tails(tasks))


def lower_bound(tasks: Sequence[Task], heads: Sequence[float], tails: Sequence[float]) -> float:
    """Seconds that no order can beat.

    Args:
        heads, tails: seconds in front of each task, and behind its end, on the longest path.
    """
    path = sum(tasks[i].duration for i in critical_path(tasks))
    by_resource: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
        by_resource.setdefault(task.resource, []).append(i)
    durations = [task.duration for task in tasks]
    bounds = [_preemptive(members, heads, durations, tails) for members in by_resource.values()]
    return max([path, *bounds])


def _preemptive(
    members: Sequence[int],
    heads: Sequence[float],
    durations: Sequence[float],
    tails: Sequence[float],
) -> float:
    """The makespan, tails included, of one resource that may interrupt tasks: the longest tail first."""
    waiting = sorted(members, key=lambda i: heads[i], reverse=True)
    ready: list[tuple[float, int]] = []
    left = {i: durations[i] for i in members}
    now = end = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, heads[waiting[-1]])
        while waiting and heads[waiting[-1]] <= now:
            i = waiting.pop()
            heapq.heappush(ready, (-tails[i], i))
        i = ready[0][1]
        until = heads[waiting[-1]] if waiting else math.inf
        step = min(left[i], until - now)
        now += step
        left[i] -= step
        if left[i] <= 0 or step == 0.0:
            heapq.heappop(ready)
            end = max(end, now + tails[i])
    return end


def _heads(tasks: Sequence[Task]) -> list[float]:
    heads: list[float] = []
    for task in tasks:
        heads.append(max((heads[j] + tasks[j].duration for j in task.after), default=0.0))
    return heads


def _tails(tasks: Sequence[Task]) -> list[float]:
    tails = [0.0] * len(tasks)
    for i in reversed(range(len(tasks))):
        for j in tasks[i].after:
            tails[j] = max(tails[j], tasks[i].duration + tails[i])
    return tails


def _priorities(
    tasks: Sequence[Task], heads: Sequence[float], tails: Sequence[float]
) -> list[list[float]]:
    """Larger goes first: the longest way to the end; the order of the program; the same with the work that
    waits on other resources counted in.
    """
    far = [task.duration + tail for task, tail in zip(tasks, tails, strict=True)]
    program = [-float(i) for i in range(len(tasks))]
    behind = [0.0] * len(tasks)
    for i in reversed(range(len(tasks))):
        for j in tasks[i].after:
            own = tasks[i].duration if tasks[i].resource != tasks[j].resource else 0.0
            behind[j] = max(behind[j], own + behind[i])
    return [far, behind, program, [tail - head for tail, head in zip(far, heads, strict=True)]]


def _frugal(tasks: Sequence[Task]) -> list[int]:
    """An order that holds little: what lets go of more than it takes comes first, then what comes first."""
    readers = [0] * len(tasks)
    behind: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for j in set(task.after):
            readers[j] += 1
            behind[j].append(i)
    takes = [
        task.memory > sum(tasks[j].memory / readers[j] for j in set(task.after)) for task in tasks
    ]
    missing = [len(set(task.after)) for task in tasks]
    ready = [(takes[i], i) for i, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for k in behind[i]:
            missing[k] -= 1
            if missing[k] == 0:
                heapq.heappush(ready, (takes[k], k))
    return order


def list_schedule(
    tasks: Sequence[Task], priority: Sequence[float], memory_cap: int | None = None
) -> Schedule | None:
    """Start, whenever a resource is free, the ready task of the largest priority that there is room for.

    Returns:
        None where what is held leaves room for no task that is ready.
    """
    behind: list[list[int]] = [[] for _ in tasks]
    missing = [len(set(task.after)) for task in tasks]
    for i, task in enumerate(tasks):
        for j in set(task.after):
            behind[j].append(i)
    ready: dict[str, list[tuple[float, int]]] = {}
    for i, count in enumerate(missing):
        if count == 0:
            heapq.heappush(ready.setdefault(tasks[i].resource, []), (-priority[i], i))
    left = [len(b) for b in behind]
    running: list[tuple[float, int]] = []
    busy: set[str] = set()
    order: list[int] = []
    held, now = 0, 0.0
    while len(order) < len(tasks) or running:
        for resource, heap in ready.items():
            if resource in busy:
                continue
            started = _pop_fitting(heap, tasks, memory_cap, held)
            if started is not None:
                busy.add(resource)
                held += tasks[started].memory
                order.append(started)
                heapq.heappush(running, (now + tasks[started].duration, started))
        if not running:
            return None
        now = running[0][0]
        while running and running[0][0] <= now:
            _, ended = heapq.heappop(running)
            busy.discard(tasks[ended].resource)
            held -= tasks[ended].memory if not behind[ended] else 0
            for j in set(tasks[ended].after):
                left[j] -= 1
                held -= tasks[j].memory if left[j] == 0 else 0
            for i in behind[ended]:
                missing[i] -= 1
                if missing[i] == 0:
                    heapq.heappush(ready.setdefault(tasks[i].resource, []), (-priority[i], i))
    return timed(tasks, order, memory_cap)


def _pop_fitting(
    heap: list[tuple[float, int]], tasks: Sequence[Task], memory_cap: int | None, held: int
) -> int | None:
    skipped = []
    found = None
    while heap:
        entry = heapq.heappop(heap)
        if memory_cap is None or held + tasks[entry[1]].memory <= memory_cap:
            found = entry[1]
            break
        skipped.append(entry)
    for entry in skipped:
        heapq.heappush(heap, entry)
    return found


def _improved(
    schedule: Schedule, bound: float, memory_cap: int | None, placements: int
) -> Schedule:
    """Simulated annealing over orders."""
    tasks, best, current = schedule.tasks, schedule, schedule
    rounds = min(_MOST_ROUNDS, placements // max(1, len(tasks)))
    if rounds < _FEWEST_ROUNDS or _reaches(best, bound):
        return best
    dice, swaps = random.Random(_SEED), _swaps(schedule)
    for step in range(rounds):
        if swaps and dice.random() < _CRITICAL:
            place, target = swaps[dice.randrange(len(swaps))]
        else:
            place = dice.randrange(1, len(tasks))
            target = max(0, place - 1 - int(dice.expovariate(1 / 3)))
        order = _pulled(tasks, current.order, place, target)
        tried = _tried(tasks, order, memory_cap, dice)
        if tried is None:
            continue
        temperature = _WARMTH * best.makespan * (1 - _CYCLES * step / rounds % 1) ** 2
        worse = tried.makespan - current.makespan
        if worse <= 0 or dice.random() < math.exp(-worse / temperature):
            current, swaps = tried, _swaps(tried)
        if current.makespan < best.makespan:
            best = current
        if _reaches(best, bound):
            break
    return best


def _reaches(schedule: Schedule, bound: float) -> bool:
    """Sums of the same numbers in another order differ in their last digits."""
    return schedule.makespan <= bound * (1 + 1e-12)


def _tried(
    tasks: Sequence[Task], order: list[int], memory_cap: int | None, dice: random.Random
) -> Schedule | None:
    """An order, read in one of several ways. Without a cap, queues: nothing ends sooner. With one, which they
    know nothing of, as it is, as queues would settle it, or as priorities: what finds no room is passed over.
    """
    if memory_cap is None:
        return queued(tasks, order)
    way = dice.randrange(3)
    if way == 0:
        priority = [0.0] * len(tasks)
        for place, i in enumerate(order):
            priority[i] = -place
        return list_schedule(tasks, priority, memory_cap)
    return timed(tasks, order if way == 1 else queued(tasks, order).order, memory_cap)


def _swaps(schedule: Schedule) -> list[tuple[int, int]]:
    """Places in the order of two tasks, the later one first, such that the later one would start sooner if the
    other did not occupy its resource, and the makespan with it: no other change helps.
    """
    tasks, starts, ends = schedule.tasks, schedule.starts, schedule.ends
    places = [0] * len(tasks)
    previous: list[int] = []  # by place: the one in front on the same resource, or -1
    last: dict[str, int] = {}
    for place, i in enumerate(schedule.order):
        resource = tasks[i].resource
        previous.append(last.get(resource, -1))
        last[resource] = places[i] = place
    found = []
    i = ends.index(schedule.makespan)
    while starts[i] > 0:
        place = places[i]
        bound_by = next((j for j in tasks[i].after if ends[j] == starts[i]), None)
        if bound_by is None:
            before = previous[place]
            if before < 0 or ends[schedule.order[before]] != starts[i]:
                before = place - 1  # it waits for that one to start, or for room
            found.append((place, before))
            bound_by = schedule.order[before]
        i = bound_by
    return found


def _pulled(tasks: Sequence[Task], order: Sequence[int], place: int, target: int) -> list[int]:
    """The order with the task at `place` moved to `target`, behind what it comes after."""
    wanted = {order[place]}
    pulled, left = [], []
    for i in reversed(order[target : place + 1]):
        if i in wanted:
            pulled.append(i)
            wanted.update(tasks[i].after)
        else:
            left.append(i)
    return [*order[:target], *reversed(pulled), *reversed(left), *order[place + 1 :]]
