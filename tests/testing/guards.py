"""What guards promise on every graph: silent where nothing went wrong, an alarm where a value was struck."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from fxpasses.effects import is_launch
from fxpasses.graph import DELIVERED, TrainingGraph
from fxpasses.guards.alarms import places_of_alarms
from fxpasses.guards.option import parse_guards
from fxpasses.passes.base import Pass
from fxpasses.passes.check_gradients import CheckGradients
from fxpasses.passes.check_payloads import CHUNK, CheckPayloads
from fxpasses.passes.check_products import CheckGradientProducts
from fxpasses.passes.check_sums import CheckSums
from fxpasses.passes.check_values import CheckValues
from fxpasses.passes.settle_checks import SettleChecks
from fxpasses.rewrite import origin_of
from fxpasses.testing.check import check_run, settings
from fxpasses.testing.oracles import ORACLES, Run
from fxpasses.testing.oracles.kept import no_dead_code
from fxpasses.testing.strategies import SEEDS, gradient_graphs
from fxpasses.testing.synthetic import GradientGraph, Leaf
from tests.testing.compression import all_ways_to_send, real_graphs
from tests.testing.strikes import alarms_of, bit_flip, increase, silent, struck, told_by

C10D = torch.ops._c10d_functional
_KINDS = ("sealed", "summed", "compared")


# What is above a limit


def limits_as_promised(run: Run) -> None:
    """Each rank counts its gradients with an element above the limit, or one that is not finite."""
    limit = parse_guards(run.current.guards).values  # type: ignore[attr-defined]
    of = {n: names for n, names in run.before.parameters_by_gradient().items() if _is_number(n)}
    index_of = {g.node: g.index for g in run.before.gradients()}
    assert run.reports[0].counts.get("checked", 0) == len(of)
    above: list[set[str]] = []
    for before in run.traced_before.results:
        values = {names[0]: before[index_of[node]] for node, names in of.items()}
        above.append({name for name, x in values.items() if _is_above(x, limit)})
    _told_of(run, alarms_of(run), above)
    if not of:
        return
    node, names = list(of.items())[run.seed % len(of)]
    (inside,) = (n for n in run.after.graph.nodes if n.name == node.name)
    readers = [n for n in inside.users if origin_of(n).rule == "limit"]
    assert all(origin_of(n).parameters == names for n in readers)
    eps = torch.finfo(node.meta["val"].dtype).eps
    edge = (limit, -limit, limit * (1 + 2 * eps), -torch.inf, torch.nan)[run.seed % 5]

    def at_the_edge(value: Tensor) -> Tensor:
        return increase(run.seed, edge)(torch.zeros(value.shape, dtype=value.dtype))  # type: ignore[return-value]

    spoiled = run.seed % run.world
    above[spoiled] = above[spoiled] - {names[0]} | ({names[0]} if run.seed % 5 > 1 else set())
    _told_of(run, struck(run, inside, readers, at_the_edge), above)


def _is_number(node: fx.Node) -> bool:
    return node.meta["val"].is_floating_point() or node.meta["val"].is_complex()


def _is_above(value: Tensor, limit: float) -> bool:
    return not bool(((value.abs() <= limit) & value.isfinite()).all())


def _told_of(run: Run, found: list[list[int]] | None, above: list[set[str]]) -> None:
    assert found is not None
    for (count, number), names in zip(found, above, strict=True):
        assert count == len(names)
        places = {f"gradient of {name}" for name in names}
        assert not names or places_of_alarms(run.after)[number] in places


# What is struck


def bits_as_promised(run: Run) -> None:
    """A bit of a gradient that changes behind its operator is told, once, by its rank alone."""
    comparisons = [n for n in run.after.walk() if DELIVERED in n.meta]
    if run.current.name == CheckGradients.name:
        assert len(comparisons) == len(run.before.parameters_by_gradient())
        assert run.reports[0].counts.get("checked", 0) == len(comparisons)
        _first_and_last(run, comparisons)
    if comparisons:
        _a_bit_is_told(run, comparisons, {run.seed % run.world})


def _a_bit_is_told(run: Run, comparisons: list[fx.Node], ranks: set[int]) -> None:
    told = comparisons[run.seed % len(comparisons)]
    gradient: Any = told.args[0]
    readers = [n for n in gradient.users if origin_of(n).rule != "bits"]
    found = struck(run, gradient, readers, bit_flip(run.seed))
    parameter = told.meta["provenance"].parameters[0]
    told_by(run, found, ranks, f"bits of the gradient of {parameter}")


def _first_and_last(run: Run, comparisons: list[fx.Node]) -> None:
    """Bits are summed right behind their gradients, and compared behind all that the program does."""
    order = run.after.positions()
    own = {n.name for n in run.before.walk()}
    program = [order[n] for n in run.after.walk() if n.name in own]
    for comparison in comparisons:
        gradient, total = comparison.all_input_nodes
        behind = [at for at in program if at > order[gradient]]
        assert order[total] < min(behind, default=order[comparison])
        assert order[comparison] > max(program, default=0)


def payloads_as_promised(run: Run) -> None:
    """Of a payload that is damaged on its way, whoever receives it tells, once."""
    names = [n.name for n in run.after.walk() if is_launch(n)]
    kinds = {n.name: kind for n in run.before.walk() if (kind := _kind_of(n)) is not None}
    sent = list(kinds)
    if not sent:
        return
    assert run.reports[0].counts == {kind: list(kinds.values()).count(kind) for kind in _KINDS}
    (launch,) = (n for n in run.after.walk() if n.name == sent[run.seed % len(sent)])
    payloads = [x.payload for x in run.traced_after.launches[names.index(launch.name)]]
    damage, receivers = bit_flip(run.seed), set(range(run.world))
    if launch.target is C10D.all_reduce.default:
        (sums,) = (
            n for n in run.after.walk() if is_launch(n) and origin_of(n).source == launch.name
        )
        chunks = -(-payloads[0].numel() // CHUNK)
        assert tuple(sums.all_input_nodes[0].meta["val"].shape) == (chunks, 2)
        size = sum(float(x.double().abs().sum()) for x in payloads)
        wire = torch.finfo(payloads[0].dtype)
        if not 4 * size + 1 < wire.max:
            return
        # Some times as much as roundings on the wire, and of the sums, can be.
        much = (4 * run.world * wire.eps / 2 + 1e-12) * size + 2 * CHUNK * wire.tiny
        damage = increase(run.seed, much)
    elif launch.target is C10D.all_to_all_single.default:
        width = payloads[0].numel() * (2 if payloads[0].is_complex() else 1)
        receivers = {run.seed % width * run.world // width}
    found = struck(run, launch.all_input_nodes[0], [launch], damage)
    parameters = ", ".join(launch.meta["provenance"].parameters)
    told_by(run, found, receivers, f"payload of {parameters}")


def _kind_of(node: fx.Node) -> str | None:
    """How a launch that carries gradients is checked; None for another one, and for complex sums."""
    if not is_launch(node) or not origin_of(node).parameters:
        return None
    value = node.all_input_nodes[0].meta["val"]
    if node.target is C10D.all_reduce.default:
        return None if value.is_complex() else "summed"
    return "sealed" if value.dtype == torch.uint8 else "compared"


def payloads_of_all_ways_to_send(examples: int) -> None:
    """However they are sent, all payloads are checked."""

    @settings(examples)
    @given(real_graphs(), all_ways_to_send(4), SEEDS)
    def search(source: GradientGraph, environment: dict[str, Any], seed: int) -> None:
        oracles = (*ORACLES, silent, payloads_as_promised, no_dead_code)
        run = check_run(CheckPayloads(), source, environment, seed, oracles)
        origins = map(origin_of, run.after.walk())
        rules = {o.rule for o in origins if o.pass_name == CheckPayloads.name}
        assert rules <= {"checksum", "alarm"}

    search()


# Comparisons that have a place to go to


@dataclasses.dataclass(frozen=True)
class Compared:
    """A drawn graph in which the bits of gradients are compared."""

    graph: GradientGraph

    def build(self) -> TrainingGraph:
        graph = self.graph.build()
        CheckGradients().run(graph)
        return graph

    def source(self) -> str:
        return self.graph.source()


def compared_graphs() -> st.SearchStrategy[Compared]:
    return st.builds(Compared, gradient_graphs())


def settled_as_promised(run: Run) -> None:
    """Each comparison stands behind the launch of what carries its gradient, or the last one if several
    parameters have that; nothing but such stands between. Sums stand right behind their gradients.
    """
    carriers: dict[str, fx.Node] = {}
    for node in run.after.walk():
        if is_launch(node):
            for parameter in origin_of(node).parameters:
                carriers.setdefault(parameter, node)
    order = run.after.positions()
    settled = 0
    for node in run.after.walk():
        launches = [carriers[p] for p in origin_of(node).parameters if p in carriers]
        if DELIVERED in node.meta and launches:
            last = max(launches, key=order.__getitem__)
            before = node.prev
            while DELIVERED in before.meta:
                before = before.prev
            assert before is last, f"{node.name} stands behind {before.name}, not {last.name}"
            settled += 1
            total: Any = node.args[1]
            while origin_of(total).rule == "bits":
                (source,) = total.all_input_nodes
                is_first = origin_of(source).rule != "bits"
                assert is_first or total.prev is source, f"{total.name} stands apart"
                total = source
    assert run.reports[0].counts["settled"] == settled
    assert not run.again().reports[0].changed
    bits_as_promised(run)


# What all ranks have to know


def agreed_as_promised(run: Run) -> None:
    """What one rank has noticed, all of them write, once the last check has looked; nothing else is sent."""
    launches = [n for n in run.after.walk() if is_launch(n)]
    sent = [n for n in launches if origin_of(n).pass_name == run.current.name]
    assert len(sent) == int(run.reports[0].changed)
    if not sent:
        return
    assert run.reports[0].counts == {"collectives": 1}
    assert sent[0].args[1] == "max" and sent[0].meta["val"].numel() == 2
    comparisons = [n for n in run.after.walk() if DELIVERED in n.meta]
    _a_bit_is_told(run, comparisons, set(range(run.world)))


def nothing_to_check() -> None:
    """Without gradients, or without a limit, or with nothing sent, the graph stays as it is."""
    empty, plain = GradientGraph((Leaf((2, 3)),)), GradientGraph((Leaf((2, 3)),), gradients=(0,))
    cases: tuple[tuple[Pass, GradientGraph | Compared], ...] = (
        (CheckValues("values=2"), empty),
        (CheckValues("products"), plain),
        (CheckGradients(), empty),
        (CheckSums(), plain),
        (CheckGradientProducts(), plain),
        (CheckPayloads(group="world", world=2), plain),
        (SettleChecks(), plain),
        (SettleChecks(), Compared(plain)),
    )
    for current, source in cases:
        graph = source.build()
        before = graph.fingerprint()
        assert not current.run(graph).changed, f"{current.spec} of {source}"
        assert graph.fingerprint() == before


def every_chunk_has_sums() -> None:
    source = GradientGraph((Leaf((2 * CHUNK + 3,)),), gradients=(0,))
    environment = {"group": "world", "world": 2, "reduce": "sum", "bucket_mb": 1.0}
    for place in (1, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 2):
        check_run(CheckPayloads(), source, environment, place, (silent, payloads_as_promised))


def sums_of_fp64_are_rounded() -> None:
    """Three elements: their sum, rounded on each rank, is not the sum of their sums."""
    source = GradientGraph((Leaf((), "float64"),), gradients=(0, 0, 0))
    environment = {"group": "world", "world": 2, "reduce": "mean", "bucket_mb": 1.0}
    check_run(CheckPayloads(), source, environment, oracles=(silent,))


SINGLE = (nothing_to_check, every_chunk_has_sums, sums_of_fp64_are_rounded)
