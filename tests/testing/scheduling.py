"""`schedule` on graphs, and its tasks on task graphs, that nobody wrote by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
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
from fxpasses.schedule.build import Program, build
from fxpasses.schedule.cost import is_view
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.tasks import Schedule, Task, in_order, needed_memory, queued
from fxpasses.spec import check as check_rules
from fxpasses.testing.check import settings
from fxpasses.testing.oracles import Run, run_pass
from fxpasses.testing.oracles.base import trace
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.oracles.rules import report_honest, signature_kept
from fxpasses.testing.strategies import SEEDS, gradient_graphs
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from tests.testing.refusals import refusal

# Where computation, codecs and the link take times that are alike, there is something to choose.
_SMALL = "latency=0.0;collective_s=1e-06"
_SLOW = f"bandwidth=3000000.0;flops=100000000.0;{_SMALL}"
_FAST = f"bandwidth=10000000.0;flops=100000000.0;{_SMALL}"
_BUSY = f"bandwidth=10000000.0;flops=100000000.0;host_s=3e-08;{_SMALL}"
MACHINES = st.sampled_from(
    (
        _SLOW,
        _FAST,
        f"bandwidth=3000000.0;flops=30000000.0;{_SMALL}",
        f"bandwidth=1000000.0;operator_s=0.0001;{_SMALL}",
        _BUSY,
        "",
    )
)
SCHEMES = st.sampled_from(("int4", "int4", "int8", "int4", "bf16", "topk:ratio=0.3", "none"))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A backward, and what is known of where it runs.

    Attributes:
        bucket_mb: MiB of a bucket.
        rates: of the machine that is planned for.
    """

    source: GradientGraph
    world: int
    scheme: str
    bucket_mb: float = 1e-9
    rates: str = ""

    def graph(self, rank: int = 0) -> TrainingGraph:
        """What there is to plan on a rank."""
        graph = self.source.build()
        Bucketing(mb=self.bucket_mb, scheme=self.scheme).run(graph)
        environment = {"group": "world", "world": self.world, "rank": rank, "reduce": "mean"}
        Compress(scheme=self.scheme).bind({**environment, "reduce_dtype": None}).run(graph)
        return graph

    def program(self, graph: TrainingGraph) -> Program:
        return build(graph, Machine.parse(self.rates), self.world)

    def tasks(self, graph: TrainingGraph) -> tuple[Sequence[Task], range]:
        """With the order in which they are given."""
        tasks = self.program(graph).tasks
        return tasks, in_order(tasks)

    def schedule(self, graph: TrainingGraph) -> Schedule:
        """What the model predicts of a graph as it is."""
        return queued(*self.tasks(graph))

    def pass_with(self, cap: float | None, layout: tuple[str, ...] | None = None) -> Scheduling:
        """The pass, with a cap in MiB."""
        return Scheduling(machine=self.rates, memory_mb=cap, world=self.world, layout=layout)


_PRODUCTS = tuple(Step("product", at, 1) for at in (0, 2, 3, 4))
_TWO_BUCKETS = GradientGraph((Leaf((8, 8)),), _PRODUCTS, (2, 4), (Leaf((8, 8)),), (5,))
_TWO_DTYPES = GradientGraph((Leaf((2, 3)), Leaf((2, 3), "bfloat16")), gradients=(0, 1))
_SAVED_GRADIENT = GradientGraph((Leaf((2, 3)),), (), (1,), (Leaf((2, 3), "float64"),))
_THREE_ALIKE = GradientGraph((Leaf((8, 8)),), gradients=(0, 0, 0))
_FOUR_SMALL = GradientGraph((Leaf((1,)),), gradients=(0, 0, 0, 0))
_SMALL_SHARDS = GradientGraph((Leaf((1,)),), gradients=(0, 0))


def _in_a_row(*operators: str, gradients: tuple[int, ...]) -> GradientGraph:
    steps = [Step(name, at + 1 if at else 0, 1) for at, name in enumerate(operators)]
    last = len(steps) + 1  # goes on to the layers below
    return GradientGraph((Leaf((8, 8)),), tuple(steps), gradients, (Leaf((8, 8)),), (last,))


_TURNED = _in_a_row("product", "double", "product", "transpose", "product", gradients=(2, 5))
_TURNED_AT_ONCE = _in_a_row("product", "transpose", "product", "product", "relu", gradients=(3, 5))


def schedules(examples: int) -> None:
    """The same nodes in another order: results bitwise the same, what is the program's own in its order. The
    step that the model predicts is shorter by what is worth it, or the graph as it was; the cap is kept.
    """

    sources = st.one_of(layers(), gradient_graphs(max_steps=8).filter(_is_real))
    worlds = st.sampled_from((3, 3, 2, 4, 1))
    sizes = st.sampled_from((1e-9, 1e-3, 3e-5, 1.0))

    @settings(examples)
    @given(
        st.builds(Setting, sources, worlds, SCHEMES, sizes, MACHINES),
        st.sampled_from((None, None, 0.8, 1.0, 1.2)),
        st.booleans(),
        SEEDS,
    )
    # A program does not wait for room as its plan does: it held two buckets where there was room for one.
    @example(Setting(_TWO_BUCKETS, 3, "bf16"), 0.8, False, 0)
    # Views of one bucket's result stood with the task behind them, and brought what they read with them.
    @example(Setting(_TWO_DTYPES, 3, "int8", rates=_FAST), 1.0, False, 0)
    # Two tasks became neighbours, and so one kernel, which held more than both of them.
    @example(Setting(_SAVED_GRADIENT, 2, "int4", rates=_SLOW), 0.8, False, 0)
    # Another order is as good, or better by less than is worth it.
    @example(Setting(_THREE_ALIKE, 3, "int4", rates=_BUSY), None, False, 0)
    @example(Setting(_FOUR_SMALL, 3, "bf16", rates=_FAST), None, False, 0)
    # Shards of which some hold nothing.
    @example(Setting(_SMALL_SHARDS, 3, "int4"), None, False, 0)
    # Of few that are drawn any order is better than the one that is there.
    @example(Setting(_TURNED, 4, "int4", rates=_FAST), None, False, 0)
    @example(Setting(_TURNED, 4, "int4", rates=_FAST), 0.8, False, 0)
    @example(Setting(_TURNED, 4, "int4", rates=_FAST), 1.2, False, 0)
    @example(Setting(_TURNED_AT_ONCE, 3, "int4", rates=_BUSY), None, False, 0)
    @example(Setting(_TURNED_AT_ONCE, 3, "int4", rates=_BUSY), 1.0, False, 0)
    def search(setting: Setting, share: float | None, agreed: bool, seed: int) -> None:
        graphs = [setting.graph(rank) for rank in range(setting.world)]
        before = setting.tasks(graphs[0])
        for graph in graphs:
            assert setting.tasks(graph) == before, "ranks could plan differently"
        peak = queued(*before).peak_memory
        cap = None if share is None else peak * share / 2**20
        layout = ("elsewhere.weight",) if agreed and seed % 4 == 0 else None
        current = setting.pass_with(cap, layout)
        try:
            runs = [run_pass([current], graph) for graph in graphs]
        except ValueError as error:
            assert cap is not None and "bytes at once" in str(error)
            assert needed_memory(*before) > int(cap * 2**20)
            assert any(map(is_wait, graphs[0].walk())), "there is nothing to move"
            return
        run = Run(
            (current,) * setting.world,
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
        _not_later(run, setting, cap, peak)
        # A second search may find an order that the first did not come upon; no other reason moves anything.
        again = run_pass([current], run.after)
        _not_later(again, setting, cap, setting.schedule(run.after).peak_memory)

    # What holds of a short search for an order holds of a long one.
    with mock.patch.object(solving, "_MOST_ROUNDS", 200):
        search()


def worth_moving() -> None:
    """Where a shorter order is found it is taken; where too much is held another; where none fits, no other."""

    def moved(setting: Setting, cap: int | None) -> Run:
        current = setting.pass_with(None if cap is None else cap / 2**20)
        run = run_pass([current], setting.graph())
        assert run.reports[0].changed
        return run

    turned = Setting(_TURNED, 4, "int4", rates=_FAST)
    for setting in (turned, Setting(_TURNED_AT_ONCE, 3, "int4", rates=_BUSY)):
        run = moved(setting, None)
        before, after = (setting.schedule(graph) for graph in (run.before, run.after))
        assert after.makespan < before.makespan * (1 - 1e-3)
    apart = turned.pass_with(None, layout=("elsewhere.weight",))
    changed = run_pass([apart], turned.graph()).reports[0].changed
    assert not changed, "ranks could send in another order"
    setting = Setting(_TWO_BUCKETS, 3, "bf16")
    cap = int(0.8 * setting.schedule(setting.graph()).peak_memory)
    held = setting.schedule(moved(setting, cap).after).peak_memory
    assert held <= cap, "too much is held"
    assert setting.schedule(moved(setting, held).after).peak_memory <= held, "no room for what fits"
    message = refusal(functools.partial(moved, setting, 1))
    assert "bytes at once" in message and " 1 bytes" in message


SINGLE = (worth_moving,)


@st.composite
def layers(draw: st.DrawFn) -> GradientGraph:
    """Backwards as they usually are: products one behind the other, each with a gradient of its own, which
    may be a view that the next one reads as well.
    """
    size, count = draw(st.sampled_from((16, 16, 8))), draw(st.integers(2, 4))
    steps: list[Step] = []
    at = 0  # of the tangent that has come so far
    gradients: list[int] = []
    for _ in range(count):
        steps.append(Step("product", at, 1))
        if draw(st.booleans()):
            steps.append(Step("transpose", 1 + len(steps)))
        gradients.append(1 + len(steps))
        at = 2 + len(steps)
        steps.append(Step(draw(st.sampled_from(("product", "relu", "double"))), at - 1, 1))
    square = Leaf((size, size))
    return GradientGraph((square,), tuple(steps), tuple(gradients), (square,))


def _is_real(graph: GradientGraph) -> bool:
    return all(g.node.meta["val"].dtype.is_floating_point for g in graph.build().gradients())


def _sent(graph: TrainingGraph) -> tuple[tuple[str, str], ...]:
    launches = [n.meta["provenance"] for n in graph.walk() if is_launch(n)]
    return tuple((str(origin.parameters), origin.rule) for origin in launches)


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


def _not_later(run: Run, setting: Setting, cap_mb: float | None, peak: int) -> None:
    """By the same model that it plans with."""
    current, report = run.current, run.reports[0]
    assert isinstance(current, Scheduling)
    before, after = (setting.schedule(graph) for graph in (run.before, run.after))
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
