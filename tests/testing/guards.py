"""What guards promise on every graph: silent where nothing went wrong, an alarm where a value was struck."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import ANY

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from custom_ops.bits import words
from fxpasses.effects import is_launch
from fxpasses.graph import ALARM, DELIVERED, REPLAYED, TrainingGraph
from fxpasses.guards.alarms import places_of_alarms
from fxpasses.guards.option import parse_guards
from fxpasses.passes.base import Pass
from fxpasses.passes.check_gradients import CheckGradients
from fxpasses.passes.check_payloads import CheckPayloads
from fxpasses.passes.check_products import CheckGradientProducts
from fxpasses.passes.check_sums import CheckSums
from fxpasses.passes.check_values import CheckValues
from fxpasses.passes.settle_checks import SettleChecks
from fxpasses.rewrite import origin_of
from fxpasses.testing.check import check_run, settings
from fxpasses.testing.operators import OPERATORS
from fxpasses.testing.oracles import ORACLES, Run
from fxpasses.testing.oracles.kept import no_dead_code
from fxpasses.testing.strategies import SEEDS, environments, gradient_graphs
from fxpasses.testing.synthetic import LAYOUTS, GradientGraph, Leaf, Step
from fxpasses.testing.values import random_inputs
from fxpasses.testing.world import run_world
from tests.testing.compression import real_graphs

# What a value becomes, by the values of others; None where it stays.
Damage = Callable[..., Tensor | None]
C10D = torch.ops._c10d_functional
_SCHEMES = (None, None, None, "int4", "bf16", "topk:ratio=0.3", "powersgd:rank=1")


def silent(run: Run) -> None:
    """No guard raises an alarm, or computes again, where nothing went wrong."""
    for rank, row in enumerate(run.traced_after.results):
        for at, _, role in run.after.outputs("state"):
            if role.name in (f"{ALARM}/", f"{REPLAYED}/"):
                assert not row[at].any(), f"{role.name} of rank {rank}: {row[at].tolist()}"


# What is above a limit


def limits_as_promised(run: Run) -> None:
    """Each rank counts its gradients with an element above the limit, or one that is not finite."""
    limit = parse_guards(run.current.guards).values  # type: ignore[attr-defined]
    of = {n: names for n, names in run.before.parameters_by_gradient().items() if _is_float(n)}
    index_of = {g.node: g.index for g in run.before.gradients()}
    assert run.reports[0].counts.get("checked", 0) == len(of)
    above: list[set[str]] = []
    for before in run.traced_before.results:
        values = {names[0]: before[index_of[node]] for node, names in of.items()}
        above.append({name for name, x in values.items() if _is_above(x, limit)})
    _told_of(run, _alarms(run), above)
    if not of:
        return
    node, names = list(of.items())[run.seed % len(of)]
    (inside,) = (n for n in run.after.graph.nodes if n.name == node.name)
    readers = [n for n in inside.users if origin_of(n).rule == "limit"]
    assert all(origin_of(n).parameters == names for n in readers)
    eps = torch.finfo(node.meta["val"].dtype).eps
    edge = (limit, -limit, limit * (1 + 2 * eps), -torch.inf, torch.nan)[run.seed % 5]

    def at_the_edge(value: Tensor) -> Tensor:
        return _add(run.seed, edge)(torch.zeros(value.shape, dtype=value.dtype))  # type: ignore[return-value]

    spoiled = run.seed % run.world
    above[spoiled] = above[spoiled] - {names[0]} | ({names[0]} if run.seed % 5 > 1 else set())
    _told_of(run, _struck(run, inside, readers, at_the_edge), above)


def _is_float(node: fx.Node) -> bool:
    return node.meta["val"].is_floating_point()


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
    assert run.reports[0].counts.get("checked", len(comparisons)) == len(comparisons)
    if comparisons:
        told = comparisons[run.seed % len(comparisons)]
        gradient: Any = told.args[0]
        readers = [n for n in gradient.users if origin_of(n).rule != "bits"]
        found = _struck(run, gradient, readers, _flip(run.seed))
        parameter = told.meta["provenance"].parameters[0]
        _told_by(run, found, {run.seed % run.world}, f"bits of the gradient of {parameter}")


def checksums_as_promised(run: Run) -> None:
    """A product or sum that is far off is told, once, by its rank alone, whatever is computed from it."""
    checked = {origin_of(n).source for n in run.after.walk() if origin_of(n).rule == "checksum"}
    nodes = [n for n in run.after.walk() if n.name in checked]
    if nodes:
        assert run.reports[0].counts == {"checked": len(nodes), "unchecked": ANY}
        node = nodes[run.seed % len(nodes)]
        (source, *rest) = node.all_input_nodes
        by = (
            [source, *rest] if rest or node.target.__name__ != "getitem" else source.all_input_nodes
        )  # type: ignore[union-attr]
        kind = "product" if "product" in run.current.name else "sum"
        found = _struck(run, node, list(node.users), _far_off(run.seed), by)
        _told_by(run, found, {run.seed % run.world}, f"{kind}: ")


def product_graphs() -> st.SearchStrategy[GradientGraph]:
    """A product and a sum, of matrices that are large enough for roundings to add up, among other operators."""
    sizes = st.sampled_from((1, 2, 3, 7, 40, 200))
    made_of = st.sampled_from(
        ("neg", "exp", "large", "sin", "relu", "double", "bfloat16", "transpose")
    )
    positions = st.integers(0, 12)
    others = st.builds(Step, st.sampled_from(OPERATORS), positions, positions)
    return st.builds(
        _product,
        st.tuples(sizes, sizes, sizes),
        st.sampled_from(("float32", "bfloat16", "float64")),
        st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
        st.tuples(made_of, made_of),
        st.lists(others, max_size=4),
        st.lists(positions, max_size=2),
    )


def _product(
    sizes: tuple[int, int, int],
    dtype: str,
    layouts: tuple[str, str],
    made_of: tuple[str, str],
    others: list[Step],
    gradients: list[int],
) -> GradientGraph:
    rows, columns, inner = sizes
    first, second = made_of
    steps = (Step(first, 0), Step(second, 1), Step("product", 2, 3), Step("sum", 2), Step("sum", 4))
    return GradientGraph(
        tangents=(Leaf((inner, rows), dtype, layouts[0]),),
        saved=(Leaf((inner, columns), dtype, layouts[1]),),
        steps=(*steps, *others),
        gradients=(4, 5, 6, *gradients),
    )


def payloads_as_promised(run: Run) -> None:
    """Of a payload that is damaged on its way, whoever receives it tells, once."""
    names = [n.name for n in run.after.walk() if is_launch(n)]
    sent = [n.name for n in run.before.walk() if _is_checked(n)]
    assert sum(run.reports[0].counts.values()) == len(sent)
    if not sent:
        return
    (launch,) = (n for n in run.after.walk() if n.name == sent[run.seed % len(sent)])
    payloads = [x.payload for x in run.traced_after.launches[names.index(launch.name)]]
    damage, receivers = _flip(run.seed), set(range(run.world))
    if launch.target is C10D.all_reduce.default:
        size = sum(float(x.double().abs().sum()) for x in payloads)
        if not 4 * size + 1 < torch.finfo(payloads[0].dtype).max:
            return
        damage = _add(run.seed, 1 + size)
    elif launch.target is C10D.all_to_all_single.default:
        width = payloads[0].numel() * (2 if payloads[0].is_complex() else 1)
        receivers = {run.seed % width * run.world // width}
    found = _struck(run, launch.all_input_nodes[0], [launch], damage)
    parameters = ", ".join(launch.meta["provenance"].parameters)
    _told_by(run, found, receivers, f"payload of {parameters}")


def _is_checked(node: fx.Node) -> bool:
    """Whether a launch carries gradients whose sums can be taken."""
    if not is_launch(node) or not origin_of(node).parameters:
        return False
    value = node.all_input_nodes[0].meta["val"]
    return node.target is not C10D.all_reduce.default or value.is_floating_point()


def all_ways_to_send(examples: int) -> None:
    """Payloads as they are, compressed, and in the order of the ranks: all of them are checked."""

    @settings(examples)
    @given(
        real_graphs(),
        environments(4),
        st.sampled_from(_SCHEMES),
        st.sampled_from(("any", "fixed")),
        SEEDS,
    )
    def search(
        source: GradientGraph,
        environment: dict[str, Any],
        scheme: str | None,
        order: str,
        seed: int,
    ) -> None:
        environment = {**environment, "compression": scheme, "reduce_order": order}
        oracles = (*ORACLES, silent, payloads_as_promised, no_dead_code)
        check_run(CheckPayloads(), source, environment, seed, oracles)

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


SINGLE = (nothing_to_check,)


# Striking


def _struck(
    run: Run,
    node: fx.Node,
    readers: Sequence[fx.Node],
    damage: Damage,
    by: Sequence[fx.Node] = (),
) -> list[list[int]] | None:
    """By rank, the alarms after one rank's value has been damaged on its way to some of its readers; None if it
    has not.

    Args:
        node, readers, by: of rank 0's graph; others have the same names.
        by: whose values `damage` is called with as well.
    """
    spoiled = run.seed % run.world
    graphs = list(run.afters)
    graphs[spoiled] = graphs[spoiled].copy()
    graph = graphs[spoiled].graph
    named = {n.name: n for n in graph.nodes}
    changed = [n for n in graph.nodes if n.name in {reader.name for reader in readers}]
    damaged: list[Tensor] = []

    def damaged_or_not(value: Tensor, *others: Any) -> Tensor:
        found = damage(value, *others)
        damaged.extend([] if found is None else [found])
        return value if found is None else found

    with graph.inserting_before(changed[0]):
        other = graph.call_function(damaged_or_not, tuple(named[n.name] for n in (node, *by)))
    for reader in changed:
        reader.replace_input_with(named[node.name], other)
    rows = [random_inputs(g, run.seed * 97 + rank) for rank, g in enumerate(run.afters)]
    results = run_world(graphs, rows)
    return _alarms(run, results) if damaged else None


def _alarms(run: Run, results: Sequence[Sequence[Any]] | None = None) -> list[list[int]]:
    """By rank, how many and the number of a place."""
    results = run.traced_after.results if results is None else results
    at = [i for i, _, role in run.after.outputs("state") if role.name == f"{ALARM}/"]
    return [row[at[0]].tolist() if at else [0, 0] for row in results]


def _told_by(run: Run, found: list[list[int]] | None, ranks: set[int], place: str) -> None:
    """These ranks have one alarm, about this place, and the others none; if anything was struck."""
    if found is None:
        return
    counts = [count for count, _ in found]
    assert counts == [int(rank in ranks) for rank in range(run.world)], f"{place}: {counts}"
    for rank in ranks:
        assert places_of_alarms(run.after)[found[rank][1]].startswith(place)


def _copied(value: Tensor) -> Tensor | None:
    """In the same layout; None where elements share their memory."""
    if any(t == 0 and s > 1 for s, t in zip(value.shape, value.stride(), strict=True)):
        return None
    memory = value.new_empty(0).set_(value.untyped_storage().clone())
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def _at(seed: int, value: Tensor) -> tuple[Tensor, ...]:
    return torch.unravel_index(torch.tensor(seed % value.numel()), value.shape)


def _flip(seed: int) -> Damage:
    """One bit of one element."""

    def flip(value: Tensor) -> Tensor | None:
        other = _copied(value)
        if other is not None:
            parts = words(other)
            bit = seed // parts.numel() % (8 * parts.element_size())
            is_sign = bit == 8 * parts.element_size() - 1
            parts[_at(seed, parts)] ^= -(1 << bit) if is_sign else 1 << bit
        return other

    return flip


def _add(seed: int, much: float) -> Damage:
    """To one element."""

    def add(value: Tensor) -> Tensor | None:
        other = _copied(value)
        if other is not None:
            other[_at(seed, value)] += much
        return other

    return add


def _far_off(seed: int) -> Damage:
    """Add more to one element than all that a product or sum of these can be, where that fits its dtype."""

    def add(value: Tensor, *by: Any) -> Tensor | None:
        floats = [x for x in by if isinstance(x, Tensor) and x.is_floating_point()]
        size = math.prod(1 + float(x.double().abs().sum()) for x in floats)
        fits = size < torch.finfo(value.dtype).max / 1e3 and bool(value.isfinite().all())
        return _add(seed, size)(value) if fits else None

    return add
