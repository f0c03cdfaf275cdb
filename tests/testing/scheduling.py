"""`schedule` on graphs, and its tasks on task graphs, that nobody wrote by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st

from fxpasses.effects import is_effectful, is_launch, is_wait
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.compress import Compress
from fxpasses.passes.schedule import Scheduling
from fxpasses.schedule import solve as solving
from fxpasses.schedule.build import build
from fxpasses.schedule.cost import is_view
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.solve import critical_path, lower_bound_of, postponed, solve
from fxpasses.schedule.tasks import Schedule, Task, in_order, needed_memory, queued, timed
from fxpasses.spec import check as check_rules
from fxpasses.testing.check import settings
from fxpasses.testing.oracles import Run, run_pass
from fxpasses.testing.oracles.base import trace
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.oracles.rules import report_honest, signature_kept
from fxpasses.testing.strategies import SEEDS, gradient_graphs
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from tests.schedule.task_graphs import optimum, task_graphs
from tests.testing.refusals import refusal

# Where computation, codecs and the link take times that are alike, there is something to choose.
_SMALL = "latency=0.0;collective_s=1e-06"
MACHINES = st.sampled_from(
    (
        f"bandwidth=3000000.0;flops=100000000.0;{_SMALL}",
        f"bandwidth=10000000.0;flops=100000000.0;{_SMALL}",
        f"bandwidth=3000000.0;flops=30000000.0;{_SMALL}",
        f"bandwidth=1000000.0;operator_s=0.0001;{_SMALL}",
        "",
    )
)
SCHEMES = st.sampled_from(("int8", "int8", "int4", "bf16", "topk:ratio=0.3", "none"))

_PRODUCTS = tuple(Step("product", at, 1) for at in (0, 2, 3, 4))
_TWO_BUCKETS = GradientGraph((Leaf((8, 8)),), _PRODUCTS, (2, 4), (Leaf((8, 8)),))


def schedules(examples: int) -> None:
    """The same nodes in another order: results bitwise the same, what is the program's own in its order. The
    step that the model predicts is shorter by what is worth it, or the graph as it was; the cap is kept.
    """

    @settings(examples)
    @given(
        st.one_of(layers(), gradient_graphs(max_steps=8).filter(_is_real)),
        st.sampled_from((3, 3, 2, 4, 1)),
        SCHEMES,
        st.sampled_from((1e-9, 1e-3, 3e-5, 1.0)),
        MACHINES,
        st.sampled_from((None, None, 0.8, 1.0, 1.2)),
        st.booleans(),
        SEEDS,
    )
    # A program does not wait for room as its plan does: it held two buckets where there was room for one.
    @example(_TWO_BUCKETS, 3, "bf16", 1e-9, "", 0.8, False, 0)
    def search(
        source: GradientGraph,
        world: int,
        scheme: str,
        bucket_mb: float,
        rates: str,
        share: float | None,
        agreed: bool,
        seed: int,
    ) -> None:
        graphs = [_reduced(source, world, rank, scheme, bucket_mb) for rank in range(world)]
        before = _program(graphs[0], rates, world)
        peak = queued(*before).peak_memory
        cap = None if share is None else peak * share / 2**20
        layout = ("elsewhere.weight",) if agreed and seed % 4 == 0 else None
        current = Scheduling(machine=rates, memory_mb=cap, world=world, layout=layout)
        try:
            runs = [run_pass([current], graph) for graph in graphs]
        except ValueError as error:
            assert cap is not None and "bytes at once" in str(error)
            assert needed_memory(*before) > int(cap * 2**20)
            return
        run = Run(
            (current,) * world,
            graphs[0],
            tuple(each.after for each in runs),
            tuple(each.reports[0] for each in runs),
            frozenset({"buckets", "reduced", "compressed"}),
            seed,
        )
        check_rules(run.after, "schedule")
        for oracle in (signature_kept, report_honest, only_moved):
            oracle(run)
        orders = {_sent(each.after) for each in runs}
        assert len(orders) == 1, "ranks that plan with the same rates send in another order"
        _computes_the_same(graphs, run)
        _not_later(run, rates, cap, peak)
        assert not run_pass([current], run.after).reports[0].changed, (
            "moves again what it has moved"
        )

    # What holds of a short search for an order holds of a long one.
    with mock.patch.object(solving, "_MOST_ROUNDS", 200):
        search()


@st.composite
def layers(draw: st.DrawFn) -> GradientGraph:
    """Backwards as they usually are: products one behind the other, each with a gradient of its own."""
    size, count = draw(st.sampled_from((16, 16, 8))), draw(st.integers(2, 4))
    steps: list[Step] = []
    at = 0  # of the tangent that has come so far
    gradients: list[int] = []
    for _ in range(count):
        gradients.append(2 + len(steps))
        steps.append(Step("product", at, 1))
        at = 2 + len(steps)
        steps.append(Step(draw(st.sampled_from(("product", "relu", "double"))), at - 1, 1))
    square = Leaf((size, size))
    return GradientGraph((square,), tuple(steps), tuple(gradients), (square,))


def _is_real(graph: GradientGraph) -> bool:
    return all(g.node.meta["val"].dtype.is_floating_point for g in graph.build().gradients())


def _reduced(
    source: GradientGraph, world: int, rank: int, scheme: str, bucket_mb: float
) -> TrainingGraph:
    graph = source.build()
    Bucketing(mb=bucket_mb, scheme=scheme).run(graph)
    environment = {"group": "world", "world": world, "rank": rank, "reduce": "mean"}
    Compress(scheme=scheme).bind({**environment, "reduce_dtype": None}).run(graph)
    return graph


def _sent(graph: TrainingGraph) -> tuple[tuple[str, str], ...]:
    launches = [n.meta["provenance"] for n in graph.walk() if is_launch(n)]
    return tuple((str(origin.parameters), origin.rule) for origin in launches)


def _program(graph: TrainingGraph, rates: str, world: int) -> tuple[Sequence[Task], range]:
    tasks = build(graph, Machine.parse(rates), world).tasks
    return tasks, in_order(tasks)


def only_moved(run: Run) -> None:
    """Every node is there, with its inputs; what has an effect, and is nobody's but the program's, in order."""
    before, after = ([*graph.graph.nodes] for graph in (run.before, run.after))
    rows = [
        sorted((n.name, str(n.target), str(n.args), str(n.kwargs)) for n in x)
        for x in (before, after)
    ]
    assert rows[0] == rows[1], "a node was changed"
    own = [
        [n.name for n in nodes if "provenance" not in n.meta and not is_view(n)]
        for nodes in (before, after)
    ]
    assert own[0] == own[1], "the program's own computation was moved"
    sent = [
        [n.name for n in nodes if is_effectful(n) and not is_wait(n)] for nodes in (before, after)
    ]
    assert sorted(sent[0]) == sorted(sent[1])


def _computes_the_same(graphs: Sequence[TrainingGraph], run: Run) -> None:
    old, new = trace(graphs, run.seed).results, run.traced_after.results
    for a, b in zip(old, new, strict=True):
        assert all(bitwise(x, y) for x, y in zip(a, b, strict=True)), "another result"


def _not_later(run: Run, rates: str, cap_mb: float | None, peak: int) -> None:
    """By the same model that it plans with."""
    current, report = run.current, run.reports[0]
    assert isinstance(current, Scheduling)
    before, after = (queued(*_program(g, rates, run.world)) for g in (run.before, run.after))
    order = [n.name for n in run.before.graph.nodes]
    moved = sum(a != n.name for a, n in zip(order, run.after.graph.nodes, strict=True))
    if current.layout is not None:
        assert not report.changed and not report.counts
        return
    assert report == Report(bool(moved), {"tasks": len(before.tasks), "moved": moved})
    cap = None if cap_mb is None else int(cap_mb * 2**20)
    if moved and (cap is None or peak <= cap):
        assert after.makespan < before.makespan * (1 - 1e-3), "moved for nothing"
    if cap is not None and any(map(is_wait, run.after.walk())):
        assert after.peak_memory <= cap, f"{after.peak_memory} bytes at once, {cap} are allowed"


# Tasks


def _orders(tasks: Sequence[Task], seed: int) -> list[int]:
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
        order = _orders(tasks, seed)
        queues = queued(tasks, order)
        _measured(queues)
        place = {i: p for p, i in enumerate(order)}
        for i in order:
            expected = max((queues.ends[j] for j in _in_front(tasks, order, i)), default=0.0)
            assert queues.starts[i] == expected
        assert list(queues.order) == sorted(order, key=lambda i: (queues.starts[i], place[i]))
        _one_by_one(tasks, order, room)

    search()


def _in_front(tasks: Sequence[Task], order: Sequence[int], i: int) -> list[int]:
    """What a task comes after, in its order, or on its resource."""
    earlier = order[: order.index(i)]
    return [*tasks[i].after, *(j for j in earlier if tasks[j].resource == tasks[i].resource)]


def _one_by_one(tasks: list[Task], order: list[int], room: int) -> None:
    """None starts before the one in front of it has; with a cap, as soon as there is room."""
    free = timed(tasks, order)
    assert free is not None and free.order == tuple(order)
    for place, i in enumerate(order):
        starts = [free.starts[j] for j in order[:place]]
        expected = max([*starts, *(free.ends[j] for j in _in_front(tasks, order, i))], default=0.0)
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
        soonest = max([*starts, *(capped.ends[j] for j in _in_front(tasks, order, i))], default=0.0)
        assert capped.starts[i] >= soonest
        if capped.starts[i] > soonest:  # all times are whole: a moment before there was no room
            held = _held(capped, order[:place], capped.starts[i] - 0.5)
            assert held + tasks[i].memory > cap, f"task {i} could start sooner"


def _held_at(tasks: Sequence[Task], order: Sequence[int], place: int) -> int:
    """Bytes that are held while a task runs, if one runs after the other."""
    ended, current = set(order[:place]), order[place]
    readers = {j: [i for i, t in enumerate(tasks) if j in t.after] for j in ended}
    kept = [j for j in ended if any(i not in ended for i in readers[j])]
    return sum(tasks[j].memory for j in [*kept, current])


def _held(schedule: Schedule, begun: Sequence[int], now: float) -> int:
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
    assert schedule.peak_memory == max(_held(schedule, everything, t) for t in schedule.starts)
    for resource in {t.resource for t in tasks}:
        assert schedule.busy(resource) == sum(t.duration for t in tasks if t.resource == resource)


def _valid(schedule: Schedule, cap: int | None) -> None:
    """Nothing starts before what it comes after has ended, or beside another on its resource."""
    tasks, starts = schedule.tasks, schedule.starts
    assert sorted(schedule.order) == list(range(len(tasks)))
    assert [starts[i] for i in schedule.order] == sorted(starts)
    for i in schedule.order:
        before = _in_front(tasks, schedule.order, i)
        assert starts[i] >= max((schedule.ends[j] for j in before), default=0.0)
    assert cap is None or schedule.peak_memory <= cap


def solutions(examples: int) -> None:
    """Valid, never later than the order given, never sooner than the bound, the same each time, and of a few
    tasks the best there is; no other task can be moved to a later place for nothing.
    """

    @settings(examples)
    @given(task_graphs(most=7, memory=True), st.sampled_from((None, 1.0, 0.8, 1.5)), SEEDS)
    def search(tasks: list[Task], share: float | None, seed: int) -> None:
        cap = None if share is None else int(needed_memory(tasks, in_order(tasks)) * share)
        try:
            found = solve(tasks, cap, placements=3000)
        except ValueError as error:
            best = optimum(tasks, cap or 0, 1e9)
            assert "bytes at once" in str(error) and best == 1e9, "there is an order that fits"
            return
        _valid(found.schedule, cap)
        as_given = timed(tasks, in_order(tasks), cap)
        assert as_given is None or found.schedule.makespan <= found.given <= as_given.makespan
        if cap is None:
            assert found.given == queued(tasks, in_order(tasks)).makespan
        assert found.bound <= found.schedule.makespan + 1e-9
        best = optimum(tasks, 10**9 if cap is None else cap, found.schedule.makespan)
        assert lower_bound_of(tasks) <= best + 1e-9, "an order beats the bound"
        assert found.schedule.makespan <= best * 1.1 + 1e-9, "there is a better order"
        expected = found.schedule.makespan / found.bound - 1 if found.bound else 0.0
        assert found.gap == expected
        assert solve(list(tasks), cap, placements=3000) == found
        _longest_way(tasks)
        _later(found.schedule, cap, seed)

    search()


def _longest_way(tasks: Sequence[Task]) -> None:
    path = critical_path(tasks)
    assert all(j in tasks[i].after for j, i in itertools.pairwise(path))
    ends: list[float] = []
    for task in tasks:
        ends.append(task.duration + max((ends[j] for j in task.after), default=0.0))
    assert sum(tasks[i].duration for i in path) == max(ends)
    assert lower_bound_of(tasks) >= max(ends)


def _later(schedule: Schedule, cap: int | None, seed: int) -> None:
    """What is postponed stands later or where it stood, and costs nothing."""
    chosen = [i for i in range(len(schedule.tasks)) if seed >> i & 1]
    late = postponed(schedule, chosen, cap)
    _valid(late, cap)
    assert late.makespan <= schedule.makespan * (1 + 1e-9)
    assert postponed(schedule, [], cap).makespan == schedule.makespan
    others = [i for i in schedule.order if i not in chosen]
    if cap is None and len(chosen) == 1:
        order = [i for i in late.order if i not in chosen]
        _right_in_front_or_costs(schedule, late, chosen[0], others, order)


def _right_in_front_or_costs(
    schedule: Schedule, late: Schedule, one: int, others: list[int], order: list[int]
) -> None:
    tasks = schedule.tasks
    readers = [i for i in others if one in tasks[i].after]
    at = others.index(readers[0]) if readers else len(others)
    wanted = queued(tasks, [*others[:at], one, *others[at:]])
    if wanted.makespan <= schedule.makespan:
        assert late.starts[one] >= wanted.starts[one] - 1e-9, "could start later"


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
