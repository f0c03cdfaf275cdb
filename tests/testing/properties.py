"""What holds of our own passes on every graph, beside what holds of every pass.

Written from what the passes promise, not from how they do it: the expected buckets, for one, are counted
here anew. `PROPERTIES` is what the mutants in `bench/mutants.py` have to survive, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import Gradient, StateSpec, TrainingGraph, ancestors
from fxpasses.passes.agree_alarms import AgreeAlarms
from fxpasses.passes.base import Pass
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.cast import Cast
from fxpasses.passes.check_gradients import CheckGradients
from fxpasses.passes.check_payloads import CheckPayloads
from fxpasses.passes.check_products import CheckGradientProducts, CheckProducts
from fxpasses.passes.check_sums import CheckSums
from fxpasses.passes.check_values import CheckValues
from fxpasses.passes.compress import Compress
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.inject import Inject, InjectForward, InjectPayload
from fxpasses.passes.loss_scale import LossScaling
from fxpasses.passes.overflow import Overflow
from fxpasses.passes.participation import Participation
from fxpasses.passes.running_stats import RunningStats
from fxpasses.passes.settle_checks import SettleChecks
from fxpasses.rewrite import Provenance, model_line, origin_of
from fxpasses.spec import check as check_rules
from fxpasses.testing.check import check_pass, run_over, settings
from fxpasses.testing.oracles import Run, orders_agree
from fxpasses.testing.oracles.base import run_pass
from fxpasses.testing.oracles.kept import no_dead_code
from fxpasses.testing.oracles.numerics import bitwise, results_right
from fxpasses.testing.strategies import SEEDS, environments, gradient_graphs
from fxpasses.testing.synthetic import LAYOUTS, GradientGraph, Leaf, Step, parameter_name
from fxpasses.testing.values import random_inputs
from fxpasses.testing.world import run_world
from tests.testing.cast_graphs import low_graphs
from tests.testing.casts import casts_as_promised
from tests.testing.checksums import bounds_as_promised, checksums_as_promised, product_graphs
from tests.testing.clipping import Behind, clipped_as_promised
from tests.testing.compression import (
    compressed_as_promised,
    matrix_graphs,
    real_graphs,
    sums_in_order,
    thin_matrices,
)
from tests.testing.faults import BOTH, IN_FORWARD, PAYLOADS, faults_as_promised
from tests.testing.guards import (
    agreed_as_promised,
    bits_as_promised,
    compared_graphs,
    limits_as_promised,
    payloads_as_promised,
    settled_as_promised,
)
from tests.testing.regions import FORWARD_REGIONS, REGIONS, modular_graphs, replayed_as_promised
from tests.testing.scaling import overflow_as_promised, scaled_as_promised
from tests.testing.statistics import statistics_as_promised
from tests.testing.strikes import silent

WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def numel(gradient: Gradient) -> Any:
    return gradient.node.meta["val"].numel()


# Bucketing


def buckets_as_promised(run: Run) -> None:
    """Buckets hold the gradients in the order in which the graph makes them (or the agreed one), close once
    they hold enough, and stand right behind the last of them.
    """
    current, graph = run.current, run.after
    assert isinstance(current, Bucketing) and current.mb is not None
    flats = [n for n in graph.walk() if "bucket" in n.meta]
    expected = _expected_buckets(run.before, current.mb * 2**20, current.layout)
    found = [n.meta["bucket"].parameters for n in flats]
    assert found == expected, f"buckets {found}, expected {expected}"
    sizes = {g.parameter: numel(g) for g in run.before.gradients()}
    for index, node in enumerate(flats):
        bucket = node.meta["bucket"]
        assert bucket.index == index and node.meta["val"].dim() == 1
        assert bucket.numels == tuple(sizes[p] for p in bucket.parameters)
        assert bucket.model_line == model_line(_producer(run, bucket.parameters[-1]))
        assert node.meta["provenance"].parameters == bucket.parameters
    assert run.reports[0].counts == {"buckets": len(flats), "gradients": sum(map(len, expected))}
    for gradient in graph.gradients():
        if numel(gradient):
            origin = gradient.node.meta["provenance"]
            assert origin.rule == "unflatten" and gradient.parameter in origin.parameters
    _stand_right_behind(run, flats)
    _layouts_kept(run)


def _producer(run: Run, parameter: str) -> fx.Node:
    return next(g.node for g in run.before.gradients() if g.parameter == parameter)


def _expected_buckets(
    graph: TrainingGraph, limit: float, layout: tuple[str, ...] | None
) -> list[tuple[str, ...]]:
    names = [n.name for n in graph.graph.nodes]
    gradients = [g for g in graph.gradients() if numel(g)]
    key = (
        (lambda g: names.index(g.node.name))
        if layout is None
        else (lambda g: layout.index(g.parameter))
    )
    done: list[list[Gradient]] = []
    for _, group in itertools.groupby(sorted(gradients, key=_dtype), key=_dtype):
        bucket: list[Gradient] = []
        for gradient in sorted(group, key=key):
            bucket.append(gradient)
            if sum(numel(g) * g.node.meta["val"].element_size() for g in bucket) >= limit:
                done.append(bucket)
                bucket = []
        done += [bucket] if bucket else []
    done.sort(key=lambda bucket: (key(bucket[-1]), bucket[-1].index))
    return [tuple(g.parameter for g in bucket) for bucket in done]


def _dtype(gradient: Gradient) -> str:
    return str(gradient.node.meta["val"].dtype)


def _stand_right_behind(run: Run, flats: list[fx.Node]) -> None:
    """No operator of the program stands between a bucket and the last gradient that it, or one before it,
    holds; no view stands before one. With an agreed order the buckets stand behind all operators.
    """
    order = [n.name for n in run.after.graph.nodes]
    own = {n.name for n in run.before.walk()}
    latest = 0
    for flat in flats:
        members = [_producer(run, p).name for p in flat.meta["bucket"].parameters]
        latest = max(latest, *(order.index(name) for name in members))
        if run.current.layout is not None:  # type: ignore[attr-defined]
            latest = max([order.index(name) for name in own], default=latest)
            assert order.index(flat.name) > latest, f"{flat.name!r} stands among the computation"
        between = own & set(order[latest + 1 : order.index(flat.name)])
        assert not between, f"{sorted(between)} stand between {flat.name!r} and its last gradient"
    views = [n for n in run.after.walk() if origin_of(n).rule == "unflatten"]
    last = max([order.index(name) for name in own], default=0)
    assert all(order.index(n.name) > last for n in views), "a view stands among the computation"


def _layouts_kept(run: Run) -> None:
    """A dense gradient keeps its strides, without an agreed order; everything else becomes contiguous."""
    after = {g.parameter: g.node for g in run.after.gradients()}
    for gradient in run.before.gradients():
        old, new = gradient.node.meta["val"], after[gradient.parameter].meta["val"]
        if not numel(gradient) or any(isinstance(s, torch.SymInt) for s in old.shape):
            continue
        dense = torch.empty_like(old).stride() == old.stride() and not _overlaps(old)
        keeps = dense and run.current.layout is None  # type: ignore[attr-defined]
        expected = old.stride() if keeps else torch.empty(old.shape, device="meta").stride()
        assert _relevant(new.shape, new.stride()) == _relevant(old.shape, expected)
        if old.is_contiguous():
            assert not [n for n in _between(gradient.node, run) if "permute" in str(n.target)]
        if dense and run.current.layout is None:  # type: ignore[attr-defined]
            copies = [n for n in _between(gradient.node, run) if "clone" in str(n.target)]
            assert not copies, f"{gradient.parameter} is copied by {copies} before its bucket is"


def _between(node: fx.Node, run: Run) -> list[fx.Node]:
    """The new nodes on the way from a gradient to its bucket."""
    mine = next(n for n in run.after.graph.nodes if n.name == node.name)
    known = {n.name for n in run.before.graph.nodes}
    found, pending = [], [mine]
    while pending:
        for user in pending.pop().users:
            if user.name not in known and user.op == "call_function" and "bucket" not in user.meta:
                found.append(user)
                pending.append(user)
    return found


def _overlaps(value: torch.Tensor) -> bool:
    return any(t == 0 and s > 1 for s, t in zip(value.shape, value.stride(), strict=True))


def _relevant(shape: Any, stride: Any) -> list[int]:
    return [t for s, t in zip(shape, stride, strict=True) if s > 1]


# Gradient synchronisation


def sync_as_promised(run: Run) -> None:
    """One launch a bucket, right behind it, in the wire's dtype; waits in order, and behind everything."""
    current, graph = run.current, run.after
    assert isinstance(current, GradientSync)
    flats = [n.meta["bucket"] for n in run.before.walk() if "bucket" in n.meta]
    launches = [n for n in graph.walk() if is_launch(n)]
    waits = [n for n in graph.walk() if is_wait(n)]
    assert [n.meta["provenance"].parameters for n in launches] == [b.parameters for b in flats]
    assert [n.meta["provenance"].model_line for n in launches] == [b.model_line for b in flats]
    assert [w.args[0] for w in waits] == launches
    for launch, bucket in zip(launches, flats, strict=True):
        payload = launch.args[0]
        assert launch.target is torch.ops._c10d_functional.all_reduce.default
        assert launch.args[1:] == ("sum", current.group) and launch.meta["reduces"] is True
        assert payload.meta["val"].numel() == sum(bucket.numels)
        own = _producer(run, bucket.parameters[0]).meta["val"].dtype
        assert payload.meta["val"].dtype == (WIRE[current.dtype] if current.dtype else own)
        assert payload.meta["bucket"] == bucket
    reduced = [n.meta["reduced_bucket"] for n in graph.walk() if "reduced_bucket" in n.meta]
    assert sorted(reduced, key=flats.index) == flats  # later passes look for these
    total = sum(
        n.args[0].meta["val"].numel() * n.args[0].meta["val"].element_size() for n in launches
    )
    assert run.reports[0].counts == {"collectives": len(launches), "bytes": total}
    _launched_early(run, launches)
    if current.overlap:
        _awaited_late(run, waits)
    else:
        assert [launch.next for launch in launches] == waits


def _launched_early(run: Run, launches: list[fx.Node]) -> None:
    """A launch stands where its bucket stood."""
    old = [n.name for n in run.before.graph.nodes]
    new = [n.name for n in run.after.graph.nodes]
    flats = [n for n in run.before.walk() if "bucket" in n.meta]
    kept = set(new)
    for flat, launch in zip(flats, launches, strict=True):
        before = {n for n in old[: old.index(flat.name)] if n in kept}
        behind = {n for n in old[old.index(flat.name) + 1 :] if n in kept}
        at = new.index(launch.name)
        assert before <= set(new[:at]) and behind <= set(new[at + 1 :]), f"{launch.name} moved"


def _awaited_late(run: Run, waits: list[fx.Node]) -> None:
    views = {n.name for n in run.after.walk() if origin_of(n).rule == "unflatten"}
    order = [n.name for n in run.after.walk()]
    own = [
        order.index(n.name)
        for n in run.after.walk()
        if n.name not in views and origin_of(n).rule != "finish"
    ]
    if waits:
        assert order.index(waits[0].name) > max(own), "a wait stands before a computation"


def division_of_the_mean(run: Run) -> None:
    """The mean divides what is sent, so that the sum of large numbers does not overflow, and never more."""
    current = run.current
    assert isinstance(current, GradientSync)
    divisions = [n for n in _new(run) if "div" in str(n.target)]
    assert bool(divisions) == (
        current.reduce == "mean" and run.world > 1 and bool(run.reports[0].counts["collectives"])
    )
    casts = [n for n in _new(run) if "to_copy" in str(n.target)]
    flats = [n for n in run.before.walk() if "bucket" in n.meta]
    own = [_producer(run, f.meta["bucket"].parameters[0]).meta["val"].dtype for f in flats]
    needed = [x for x in own if current.dtype and x != WIRE[current.dtype]]
    assert bool(casts) == bool(needed), f"casts {casts}, dtypes {own}, wire {current.dtype}"
    wide = [torch.promote_types(x, WIRE[current.dtype]) if current.dtype else x for x in own]
    found = {division.args[0].meta["val"].dtype for division in divisions}
    assert not divisions or found == set(wide), f"divides in {found}, expected {wide}"


def mean_keeps_large_numbers() -> None:
    """Case 16: dividing behind the sum, or in half precision before it, would overflow."""
    spec = GradientGraph((Leaf((2,)),), gradients=(0,))
    options = {"reduce": "mean", "reduce_dtype": "fp16", "bucket_mb": 1.0, "group": "world"}
    for world, own, expected in (
        (2, 32768.0, 32768.0),
        (8, 32768.0, 32768.0),
        (2, 98304.0, 49152.0),
    ):
        run = run_over(GradientSync(), spec.build(), {**options, "world": world, "layout": None})
        others = own if own == expected else 0.0
        values = [own, *[others] * (world - 1)]
        for (gradient,) in run_world(run.after, [[torch.full((2,), value)] for value in values]):
            assert gradient.tolist() == [expected, expected]


# Participation


def participation_as_promised(run: Run) -> None:
    """The first collective sums one float for each gradient, or each agreed parameter."""
    current, graph = run.current, run.after
    assert isinstance(current, Participation)
    needed = _tangents_needed(run.before)
    assert run.reports[0].changed == (len(set(needed)) > 1 or current.layout is not None)
    if not run.reports[0].changed:
        return
    launches = [n for n in graph.walk() if is_launch(n)]
    waits = [n for n in graph.walk() if is_wait(n)]
    assert len(launches) == len(waits) == 1 and launches[0].args[1:] == ("sum", current.group)
    assert next(iter(graph.walk())) is launches[0], "the flags are not sent first"
    assert waits[0].next is graph.output_node, "the flags are not awaited last"
    ((node, role),) = [x for x in graph.inputs("state") if x[1].name.startswith("participation/")]
    flags = len(needed if current.layout is None else current.layout)
    assert node.meta["state"] == StateSpec(
        "participation", "", (flags,), torch.float32, torch.device("cpu")
    )
    assert run.reports[0].counts == {"flags": flags} and not launches[0].meta.get("reduces")
    ((at, value, _),) = [x for x in graph.outputs("state") if x[2] == role]
    assert value is waits[0]
    given = [
        dict(
            zip(
                [r for _, r in graph.inputs()],
                random_inputs(graph, run.seed * 97 + rank),
                strict=True,
            )
        )
        for rank in range(run.world)
    ]
    expected = torch.stack([row[role] for row in given]).sum(0)
    for row in run.traced_after.results:
        torch.testing.assert_close(row[at], expected)


def _tangents_needed(graph: TrainingGraph) -> list[frozenset[fx.Node]]:
    """For each gradient that depends on tangents, those."""
    tangents = {n for n, _ in graph.inputs("tangent")}
    outputs = graph.outputs("gradient") + graph.outputs("input_gradient")
    found = [frozenset(ancestors([n]) & tangents) for _, n, _ in outputs if n is not None]
    return [needed for needed in found if needed]


# What each pass may say of its nodes: dumps, bisection and recovery paths go by these names.
RULES = {
    "measure_norms": {"measure"},
    "agree_alarms": {"agree"},
    "inject_forward": {"bitflip", "sign", "news"},
    "inject": {"bitflip", "sign", "news"},
    "inject_payload": {"bitflip", "stale", "news"},
    "check_products": {"checksum", "alarm"},
    "check_gradient_products": {"checksum", "alarm"},
    "check_sums": {"checksum", "alarm"},
    "check_gradients": {"bits", "checksum", "alarm"},
    "settle_checks": set(),
    "check_values": {"limit", "alarm"},
    "check_payloads": {"checksum", "alarm"},
    "replay_forward": {"loop", "form", "dropout", "alarm"},
    "replay_backward": {"loop", "form", "dropout", "alarm"},
    "cast": {"cast"},
    "bucketing": {"flatten", "unflatten"},
    "participation": {"launch", "finish"},
    "running_stats": {"launch", "finish"},
    "loss_scale": {"reciprocal", "scale", "unscale"},
    "overflow": {"check"},
    "gradient_sync": {"launch", "relaunch", "finish"},
    "clip_norm": {"norm", "multiply"},
}


def no_leftovers(run: Run) -> None:
    no_dead_code(run)
    says_where_from(run)


def says_where_from(run: Run) -> None:
    own = run.current.name
    copies = (
        {("bucketing", "unflatten")} if own == "clip_norm" else set()
    )  # views of what it scales
    found = {(n.meta["provenance"].pass_name, n.meta["provenance"].rule) for n in _new(run)}
    assert found <= {(own, rule) for rule in RULES[own]} | copies, f"nodes by {found}"
    assert all(isinstance(n.meta["provenance"], Provenance) for n in _new(run)), "no provenance"
    assert all("val" in n.meta for n in _new(run)), "a new node has no fake value"


def _new(run: Run) -> list[fx.Node]:
    known = {n.name for n in run.before.graph.nodes}
    return [n for n in run.after.walk() if n.name not in known]


# Several passes


def pipelines_agree(examples: int) -> None:
    """The whole pipeline, in every order that contracts allow, gives the same results."""

    @settings(examples)
    @given(gradient_graphs(), environments(3), SEEDS)
    def search(source: GradientGraph, environment: dict[str, Any], seed: int) -> None:
        passes = [Bucketing(), RunningStats(), GradientSync()]
        bound = [p.bind({**environment, "rank": 0}) for p in passes]
        assert orders_agree(bound, source.build(), environment["world"], seed) == 3

    search()


def overlap_changes_nothing(examples: int) -> None:
    """Case 22: when waits stand late, results are the same in every bit."""

    @settings(examples)
    @given(gradient_graphs(), environments(3), SEEDS)
    def search(source: GradientGraph, environment: dict[str, Any], seed: int) -> None:
        runs = [
            run_over(GradientSync(overlap=x), source.build(), environment, seed)
            for x in (True, False)
        ]
        rows = [run.traced_after.results for run in runs]
        for with_overlap, without in zip(*rows, strict=True):
            assert all(bitwise(a, b) for a, b in zip(with_overlap, without, strict=True))

    search()


def bucket_limits(examples: int) -> None:
    """Many gradients with about as many elements as fit, in the graph's order or an agreed one."""
    sizes = st.lists(st.sampled_from((1, 2, 5, 21, 22, 23, 24, 25, 96)), min_size=2, max_size=6)
    limits = st.sampled_from((4, 5, 8, 48, 96, 97, 100, 192))

    @settings(examples)
    @given(
        sizes,
        limits,
        st.sampled_from(("float32", "bfloat16")),
        st.permutations(range(6)),
        st.booleans(),
    )
    def search(sizes: list[int], limit: int, dtype: str, order: list[int], agreed: bool) -> None:
        leaves = tuple(Leaf((size,), "float32") for size in sizes)
        steps = tuple(Step(dtype if i % 3 == 0 else "double", i) for i in order if i < len(sizes))
        count = len(sizes)
        spec = GradientGraph(leaves, steps, tuple(range(count, 2 * count)))
        layout = tuple(parameter_name(i) for i in order) if agreed else None
        current = Bucketing(mb=limit / 2**20, layout=layout)
        buckets_as_promised(run_pass([current], spec.build()))

    search()


def bucket_layouts(examples: int) -> None:
    """Gradients that lie in memory in every way there is."""
    shapes = st.sampled_from(((2, 3, 4), (2, 3), (3, 1, 2), (2, 2), (4,), (2, 1)))
    leaves = st.lists(
        st.builds(Leaf, shapes, layout=st.sampled_from(LAYOUTS)), min_size=1, max_size=3
    )

    @settings(examples)
    @given(leaves, SEEDS)
    def search(leaves: list[Leaf], seed: int) -> None:
        spec = GradientGraph(tuple(leaves), gradients=tuple(range(len(leaves))))
        run = run_pass([Bucketing(mb=1.0)], spec.build(), seed=seed)
        buckets_as_promised(run)
        results_right(run)

    search()


def layouts(examples: int) -> None:
    """With an agreed order of parameters, whatever the graph's own."""

    @settings(examples)
    @given(gradient_graphs(), environments(3), SEEDS, st.randoms(use_true_random=False))
    def search(source: GradientGraph, environment: dict[str, Any], seed: int, random: Any) -> None:
        names = [parameter_name(i) for i in range(len(source.gradients))] + ["elsewhere.weight"]
        random.shuffle(names)
        agreed = {**environment, "layout": tuple(names)}
        for current, oracle in (
            (Bucketing(), buckets_as_promised),
            (Participation(), participation_as_promised),
        ):
            if not source.build().outputs() or all(
                n is None for _, n, _ in source.build().outputs()
            ):
                return
            run = run_over(current, source.build(), agreed, seed)
            check_rules(run.after, current.name)
            oracle(run)

    search()


OWN: dict[str, tuple[Pass, tuple[Callable[[Run], None], ...]]] = {
    "cast": (Cast(), (casts_as_promised, no_leftovers)),
    "bucketing": (Bucketing(), (buckets_as_promised, no_leftovers)),
    "participation": (Participation(), (participation_as_promised, no_leftovers)),
    "running_stats": (RunningStats(), (statistics_as_promised, no_leftovers)),
    "loss_scale": (LossScaling(), (scaled_as_promised, no_leftovers)),
    "overflow": (Overflow(), (overflow_as_promised, no_leftovers)),
    "gradient_sync": (GradientSync(), (sync_as_promised, division_of_the_mean, says_where_from)),
    "check_products": (
        CheckProducts(),
        (silent, checksums_as_promised, bounds_as_promised, no_leftovers),
    ),
    "check_gradient_products": (
        CheckGradientProducts(),
        (silent, checksums_as_promised, bounds_as_promised, no_leftovers),
    ),
    "check_sums": (CheckSums(), (silent, checksums_as_promised, bounds_as_promised, no_leftovers)),
    "check_gradients": (CheckGradients(), (silent, bits_as_promised, no_leftovers)),
    "settle_checks": (SettleChecks(), (silent, settled_as_promised, no_leftovers)),
    "check_values": (CheckValues("values=2"), (limits_as_promised, no_leftovers)),
    "check_payloads": (CheckPayloads(), (silent, payloads_as_promised, no_leftovers)),
    "agree_alarms": (AgreeAlarms(), (silent, agreed_as_promised, no_leftovers)),
    "inject_forward": (InjectForward(IN_FORWARD), (faults_as_promised, no_leftovers)),
    "inject": (Inject(BOTH), (faults_as_promised, no_leftovers)),
    "inject_payload": (InjectPayload(PAYLOADS), (faults_as_promised, no_leftovers)),
    "replay_forward": (FORWARD_REGIONS, (silent, replayed_as_promised, no_leftovers)),
    "replay_backward": (REGIONS, (silent, replayed_as_promised, no_leftovers)),
    "gradient_sync_at_once": (
        GradientSync(overlap=False),
        (sync_as_promised, division_of_the_mean),
    ),
    "gradient_sync_in_order": (GradientSync(order="fixed"), (sums_in_order, says_where_from)),
    "gradient_sync_in_order_at_once": (
        GradientSync(order="fixed", overlap=False),
        (sums_in_order,),
    ),
    **{
        f"compress_{words}": (Compress(scheme=words), (compressed_as_promised,))
        for words in (
            *("int4", "int8", "topk:ratio=0.3", "bf16"),
            *("int4:stochastic=true:feedback=ef21", "topk:momentum=0.5"),
        )
    },
    "compress_powersgd": (
        Compress(scheme="powersgd:rank=1"),
        (compressed_as_promised, thin_matrices),
    ),
    "compress_powersgd_forgetful": (
        Compress(scheme="powersgd:rank=2:feedback=false"),
        (compressed_as_promised, thin_matrices),
    ),
    "clip_norm": (Behind(max_norm=1.0), (clipped_as_promised, says_where_from)),
}


# Where graphs that are drawn for any pass would seldom give it something to do, or something it refuses.
GRAPHS = {"cast": low_graphs()} | {name: real_graphs() for name in OWN if "compress" in name}
GRAPHS["replay_forward"] = modular_graphs(forward=True)
GRAPHS["replay_backward"] = modular_graphs()
GRAPHS["settle_checks"] = GRAPHS["agree_alarms"] = compared_graphs()
GRAPHS["inject"] = st.one_of(gradient_graphs(), compared_graphs())
GRAPHS["check_products"] = product_graphs(forward=True)
GRAPHS["check_gradient_products"] = GRAPHS["check_sums"] = product_graphs()
GRAPHS["compress_powersgd"] = GRAPHS["compress_powersgd_forgetful"] = matrix_graphs()


def holds(name: str, examples: int | None = None, programs: int | None = None) -> None:
    """One of our passes, through everything."""
    current, oracles = OWN[name]
    graphs = GRAPHS.get(name)
    check_pass(current, examples=examples, programs=programs, oracles=oracles, graphs=graphs)


__all__ = ["OWN", "holds"]
