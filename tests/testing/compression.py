"""What holds of gradients that are sent compressed, or summed in the order of the ranks, on every graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from fxpasses.compression import Scheme, parse_rules
from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import Role, TrainingGraph
from fxpasses.passes.compress import Compress
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.rewrite import Provenance, origin_of
from fxpasses.testing.check import check_run
from fxpasses.testing.oracles import Run
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.strategies import environments, gradient_graphs
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from tests.testing.again import again

WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RULES = {"encode", "launch", "receive", "recode", "relaunch", "wait", "decode", "commit", "finite"}
FEEDBACK = {"residual", "velocity", "estimate", "mean_estimate"}
EPS = torch.finfo(torch.float32).eps


def only_scheme(words: str) -> Scheme:
    """The scheme of all parameters."""
    ((_, scheme),) = parse_rules(words)
    return scheme


def real_graphs() -> st.SearchStrategy[GradientGraph]:
    """Without complex gradients, which no scheme takes."""

    def is_real(graph: GradientGraph) -> bool:
        gradients = graph.build().gradients()
        return all(g.node.meta["val"].dtype.is_floating_point for g in gradients)

    return gradient_graphs().filter(is_real)


def matrix_graphs() -> st.SearchStrategy[GradientGraph]:
    """Gradients large enough to become thin matrices, among some that are not."""
    # Some gain just as much as is asked for, with one column or two, and some a little less.
    shapes = st.sampled_from(
        ((8, 6), (6, 9), (5, 2, 4), (3,), (4, 4), (3, 3), (2, 2), (), (8, 8), (3, 6))
    )
    leaves = st.lists(shapes, min_size=1, max_size=3).map(lambda s: tuple(map(Leaf, s)))
    return leaves.map(lambda t: GradientGraph(t, gradients=tuple(range(len(t)))))


def all_ways_to_send(max_world: int) -> st.SearchStrategy[dict[str, Any]]:
    """Environments in which payloads are as they are, compressed, or in the order of the ranks."""
    schemes = (None, None, "int4", "bf16", "topk:ratio=0.3", "powersgd:rank=1")
    return st.builds(
        lambda found, scheme, order: {**found, "compression": scheme, "reduce_order": order},
        environments(max_world),
        st.sampled_from(schemes),
        st.sampled_from(("any", "fixed")),
    )


def compressed_as_promised(run: Run) -> None:
    """Launches stand behind their buckets, waits behind everything; what is counted is what is sent; what is
    not sent is kept, and nothing that is not finite.
    """
    current, graph = run.current, run.after
    assert isinstance(current, Compress)
    scheme = only_scheme(current.scheme or "")
    counted_as_sent(run)
    if not any(map(is_launch, graph.walk())):
        return
    known = {n.name for n in run.before.graph.nodes}
    new = [n for n in graph.walk() if n.name not in known]
    for node in new:
        origin = node.meta["provenance"]
        assert isinstance(origin, Provenance) and origin.pass_name == "compress"
        # What is sent as it is has rules of its own.
        assert origin.rule in RULES | {"finish"}, origin.rule
    if any(n.meta["provenance"].rule == "encode" for n in new) and scheme.scheme != "powersgd":
        states = {role.name.partition("/")[0] for _, _, role in graph.outputs("state")}
        assert states & FEEDBACK == states_of(scheme)
    legs_in_order(run)
    _as_large_everywhere(run)
    _kept(run, scheme)
    not_poisoned(run)


def counted_as_sent(run: Run) -> None:
    """What a report counts; nothing where there are no buckets."""
    buckets = [n for n in run.before.walk() if "bucket" in n.meta]
    launches = [n for n in run.after.walk() if is_launch(n)]
    assert bool(launches) == bool(buckets)
    payloads = [n.args[0].meta["val"] for n in launches]  # type: ignore[union-attr]
    sent = sum(p.numel() * p.element_size() for p in payloads)
    counts = run.reports[0].counts
    found = tuple(counts.get(name, 0) for name in ("buckets", "collectives", "bytes"))
    assert found == (len(buckets), len(launches), sent)


def states_of(scheme: Scheme) -> set[str]:
    """What has to be kept from step to step so that nothing is lost."""
    if scheme.scheme in ("bf16", "fp16") or not scheme.feedback:
        return set()
    kept = {"estimate", "mean_estimate"} if scheme.feedback == "ef21" else {"residual"}
    return kept | ({"velocity"} if scheme.momentum else set())


def legs_in_order(run: Run) -> None:
    """First legs in the order of their buckets, each in front of what was computed behind that; every wait for
    a result behind all computation.
    """
    before = [n for n in run.before.walk() if "bucket" in n.meta]
    if not before:
        return
    first = [n for n in run.after.walk() if is_launch(n) and origin_of(n).rule == "launch"]
    carried = [n.meta["provenance"].parameters for n in first]
    assert carried == [n.meta["bucket"].parameters for n in before]
    names = [n.name for n in run.after.graph.nodes]
    old = [n.name for n in run.before.graph.nodes]
    views = {n.name for n in run.before.walk() if origin_of(n).rule == "unflatten"}
    for launch, bucket in zip(first, before, strict=True):
        behind = {n for n in old[old.index(bucket.name) + 1 :] if n in names}
        assert behind <= set(names[names.index(launch.name) + 1 :]), f"{launch.name} is late"
    computed = [names.index(n) for n in old if n in names and n not in views and n != "output"]
    results = [
        n for n in run.after.walk() if is_wait(n) and origin_of(n).rule in ("wait", "finish")
    ]
    assert results and min(names.index(n.name) for n in results) > max(computed)


def _as_large_everywhere(run: Run) -> None:
    """The same operators make as much on every rank: each plans with its own graph, and all find one plan."""

    def sizes(graph: TrainingGraph) -> list[tuple[str, list[torch.Size]]]:
        values = [(str(n.target), tree_leaves(n.meta.get("val"))) for n in graph.walk()]
        return [(name, [x.shape for x in found]) for name, found in values]

    for rank, graph in enumerate(run.afters):
        assert sizes(graph) == sizes(run.after), f"rank {rank} has other sizes"


def _written(run: Run) -> list[dict[str, torch.Tensor]]:
    """By rank, the states that the first run wrote."""
    return [
        {role.name: row[at] for at, _, role in graph.outputs("state")}
        for graph, row in zip(run.afters, run.traced_after.results, strict=True)
    ]


def _second_step(run: Run, scheme: Scheme, gradients: dict[str, int], scale: int) -> None:
    """All ranks have the same again, and what was not sent is sent with the next gradients."""
    before, first = run.traced_before.results, run.traced_after.results
    written = _written(run)
    second = again(run, run.afters, lambda rank, role, x: written[rank].get(role.name, x))
    for name, index in gradients.items():
        assert all(bitwise(row[index], second[0][index]) for row in second), f"{name} differs"
    if scheme.momentum:
        return
    specs = {r.name: n.meta["state"] for n, r in run.after.inputs("state")}
    for at, _, role in run.after.outputs("state"):
        if role.name.startswith("residual/"):
            rest = [
                row[at].double().split([n for _, n in specs[role.name].parts]) for row in second
            ]
            for place, (name, _) in enumerate(specs[role.name].parts):
                index = gradients[name]
                local = 2 * sum(float(row[index].double().sum()) for row in before)
                size = sum(float(row[index].double().abs().sum()) for row in before)
                sent = sum(float(rows[0][index].double().sum()) for rows in (first, second))
                kept = sum(float(row[place].sum()) for row in rest)
                slack = 2 * (1e-4 + torch.finfo(first[0][index].dtype).eps)
                assert abs(scale * sent + kept - local) <= slack * size + 1e-25, name


def _kept(run: Run, scheme: Scheme) -> None:
    """What arrived, as often as there are ranks, and all residuals are what all ranks had."""
    before, after = run.traced_before.results, run.traced_after.results
    gradients = {g.parameter: g.index for g in run.before.gradients()}
    finite = all(row[i].isfinite().all() for row in before for i in gradients.values())
    scale = run.world if run.current.reduce == "mean" else 1
    for graph_output, _, role in run.after.outputs("state"):
        kind = role.name.partition("/")[0]
        states = [row[graph_output] for row in after]
        specs = {r.name: n.meta["state"] for n, r in run.after.inputs("state")}
        parts = specs[role.name].parts
        if not finite or kind not in ("residual", "estimate", "mean_estimate"):
            assert all(s.isfinite().all() for s in states), f"{role.name} is not finite"
            continue
        split = [s.double().split([n for _, n in parts]) for s in states]
        for at, (name, _) in enumerate(parts):
            index = gradients[name]
            local = torch.stack([row[index].double().sum() for row in before])
            size = sum(float(row[index].double().abs().sum()) for row in before)
            kept = sum(float(row[at].sum()) for row in split)
            arrived = scale * float(after[0][index].double().sum())
            slack = size * (1e-4 + torch.finfo(after[0][index].dtype).eps)  # delivered rounded
            if kind == "residual" and not scheme.momentum:
                assert abs(arrived + kept - float(local.sum())) <= slack + 1e-25, name
            if kind == "mean_estimate":  # the mean of all estimates, which is the result
                assert abs(run.world * float(split[0][at].sum()) - arrived) <= slack + 1e-25, name
    if finite:
        _second_step(run, scheme, gradients, scale)


def not_poisoned(run: Run) -> None:
    """Where a rank has what is not finite, every rank keeps what it kept."""
    written, spoiled = _written(run), run.seed % run.world

    def spoil(rank: int, role: Role, value: torch.Tensor) -> torch.Tensor:
        if rank == spoiled and role.kind == "tangent":
            value.new_empty(0).set_(value.untyped_storage()).fill_(torch.inf)  # however it lies
            return value
        return written[rank].get(role.name, value)

    local = again(run, [run.before] * run.world, spoil)
    indices = [g.index for g in run.before.gradients()]
    if all(row[index].isfinite().all() for row in local for index in indices):
        return
    for rank, row in enumerate(again(run, run.afters, spoil)):
        for at, _, role in run.after.outputs("state"):
            assert bitwise(row[at], written[rank][role.name]), f"{role.name} is poisoned"


def expanded_tangents_are_spoiled() -> None:
    """What a graph views without a copy lies as it did when the graph was made."""
    tangent = Leaf((4,), layout="expanded")
    source = GradientGraph((tangent,), (Step("expand"), Step("flatten", 1)), gradients=(1,))
    environment = {"world": 2, "group": "world", "reduce": "mean", "bucket_mb": 1.0}
    check_run(Compress(scheme="int4"), source, environment, oracles=(not_poisoned,))


SINGLE = (expanded_tangents_are_spoiled,)


def thin_matrices(run: Run) -> None:
    """What arrives of a matrix is of the rank, and the mean projected; what is small arrives as it is."""
    current = run.current
    assert isinstance(current, Compress)
    scheme = only_scheme(current.scheme or "")
    before, after = run.traced_before.results, run.traced_after.results
    scale = run.world if current.reduce == "sum" else 1
    states = {role.name.partition("/")[0] for _, _, role in run.after.outputs("state")}
    shapes = {g.parameter: tuple(g.node.meta["val"].shape) for g in run.before.gradients()}
    thin = {name for name, shape in shapes.items() if is_thin(shape, scheme.rank)}
    assert ("subspace" in states) == bool(thin)
    assert ("residual" in states) == bool(thin and scheme.feedback)
    _small_leave_nothing(run, thin)
    if thin:
        _begins_where_it_ended(run, scheme.rank)
    for gradient in run.before.gradients():
        exact = torch.stack([row[gradient.index].double() for row in before]).mean(0) * scale
        found = after[0][gradient.index].double()
        if not is_thin(tuple(exact.shape), scheme.rank):
            if current.dtype is None:  # else a bucket of nothing but these may be rounded
                torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6 * scale)
            continue
        matrix = found.reshape(exact.shape[0], -1)
        assert torch.linalg.matrix_rank(matrix, rtol=1e-4) <= scheme.rank
        lost = (found - exact).norm() / exact.norm()
        assert lost < 0.999, f"{lost} of {gradient.parameter} is lost"
        # P is orthonormal and Q = Mᵀ P, so what arrives is M projected: at a right angle to what is lost.
        angle = torch.dot(found.flatten(), (exact - found).flatten()) / exact.square().sum()
        assert abs(angle) < 1e-4, f"{gradient.parameter} is not projected: {angle}"


def _begins_where_it_ended(run: Run, rank: int) -> None:
    """What arrives is the mean, projected onto what it makes of the subspace that is there."""
    graph, scale = run.after, run.world if run.current.reduce == "sum" else 1  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(run.seed)

    def begin(rank: int, role: Role, old: torch.Tensor) -> torch.Tensor:
        if role.kind != "state":
            return old
        drawn = torch.randn(old.shape, generator=generator)
        is_subspace = role.name.startswith("subspace/")
        return starts.setdefault(role.name, drawn if is_subspace else drawn * 0)

    starts: dict[str, torch.Tensor] = {}
    found = again(run, run.afters, begin)[0]
    gradients = {g.parameter: g.index for g in run.before.gradients()}
    for node, role in graph.inputs("state"):
        if not role.name.startswith("subspace/"):
            continue
        parts = node.meta["state"].parts
        pieces = starts[role.name].double().split([numel for _, numel in parts])
        for (parameter, numel), start in zip(parts, pieces, strict=True):
            index = gradients[parameter]
            rows = [
                row[index].double().reshape(-1, numel // rank) for row in run.traced_before.results
            ]
            mean = torch.stack(rows).mean(0)
            basis = torch.linalg.qr(mean @ torch.linalg.qr(start.view(-1, rank)).Q).Q
            expected = scale * basis @ basis.t() @ mean
            error = (found[index].double().reshape_as(mean) - expected).norm()
            assert error <= 1e-3 * scale * mean.norm(), f"{parameter}: {error}"


def _small_leave_nothing(run: Run, thin: set[str]) -> None:
    specs = {r.name: n.meta["state"] for n, r in run.after.inputs("state")}
    for at, _, role in run.after.outputs("state"):
        if role.name.startswith("residual/"):
            parts = specs[role.name].parts
            for row in run.traced_after.results:
                for (name, _), rest in zip(
                    parts, row[at].split([n for _, n in parts]), strict=True
                ):
                    assert name in thin or not rest.any(), f"{name} arrived and is kept as well"


def is_thin(shape: tuple[int, ...], rank: int) -> bool:
    if len(shape) < 2:
        return False
    columns = math.prod(shape[1:])
    return 2 * rank * (shape[0] + columns) <= shape[0] * columns


def sums_in_order(run: Run) -> None:
    """Bitwise the sum from rank 0 on, of what each rank has in the wire's dtype, in the wider of the two."""
    current = run.current
    assert isinstance(current, GradientSync)
    _in_two_legs(run)
    if run.world < 3:
        return
    before, after = run.traced_before.results, run.traced_after.results
    for gradient in run.before.gradients():
        own = gradient.node.meta["val"].dtype
        wire = WIRE[current.dtype] if current.dtype else own
        wide = torch.promote_types(own, wire)
        if wide.itemsize < 4:
            continue  # compilers and eager kernels differ in what they round between two additions
        rows = [row[gradient.index] for row in before]
        if current.reduce == "mean":
            rows = [row.to(wide) / run.world for row in rows]
        total = functools.reduce(torch.add, [row.to(wire).to(wide) for row in rows])
        expected, found = total.to(wire).to(own), after[0][gradient.index]
        same = (expected == found) | (expected.isnan() & found.isnan())
        assert bool(same.all()), f"{gradient.parameter} is not summed in the order of the ranks"


def _in_two_legs(run: Run) -> None:
    """From three ranks on; two ranks' sum has one order. A second leg stands behind the next bucket's first,
    which is on its way then, and the last one behind everything; without overlap each follows its own.
    """
    buckets = [n.meta["bucket"].parameters for n in run.before.walk() if "bucket" in n.meta]
    launches = [n for n in run.after.walk() if is_launch(n)]
    legs = 2 if run.world > 2 else 1
    assert len(launches) == legs * len(buckets), f"{len(launches)} for {len(buckets)} buckets"
    sent_in_order(run, dict.fromkeys(buckets, legs))


def sent_in_order(run: Run, legs: Mapping[tuple[str, ...], int]) -> None:
    """First legs in order, each second leg behind the next bucket's first one; without overlap, behind its own.

    Args:
        legs: by bucket, in order, in how many it is sent.
    """
    buckets = list(legs)
    expected = buckets[:1]
    for position, bucket in enumerate(buckets, 1):
        expected += [*buckets[position : position + 1], *[bucket] * (legs[bucket] - 1)]
    if not run.current.overlap:  # type: ignore[attr-defined]
        expected = [bucket for bucket in buckets for _ in range(legs[bucket])]
    found = [n.meta["provenance"].parameters for n in run.after.walk() if is_launch(n)]
    assert found == expected, f"sends {found}, expected {expected}"
