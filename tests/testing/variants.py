"""Variants of one backward on graphs that nobody wrote by hand."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx

from fxpasses.distributed.plans import Form, Union
from fxpasses.graph import BUFFER_STATE, Role, StateSpec, TrainingGraph
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.spec import check as check_rules
from fxpasses.spec import reduced_once
from fxpasses.testing.check import run_over, settings
from fxpasses.testing.oracles.base import trace
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.strategies import SEEDS, gradient_graphs, whole_steps
from fxpasses.testing.synthetic import GradientGraph, Leaf
from fxpasses.testing.values import random_inputs
from fxpasses.variants import LEFT, TOTAL, Variant, pending_of, prepare


def variants_as_promised(examples: int) -> None:
    """`total` adds what is pending to each gradient that has elements; `absent` ones become gradients."""

    @settings(examples)
    @example(GradientGraph((Leaf((0, 2)),), (), (0,)), 0, TOTAL, [])  # nothing can be pending
    @given(
        gradient_graphs(),
        SEEDS,
        st.sampled_from((TOTAL, "synchronise", "local", LEFT)),
        st.lists(SHAPED, max_size=2),
    )
    def search(source: GradientGraph, seed: int, mode: str, absent: list[Leaf]) -> None:
        graph, before = source.build(), source.build()
        specs = tuple(
            pending_of(f"absent{i}.weight", leaf.empty()) for i, leaf in enumerate(absent)
        )
        union = Union((), ()) if absent else None
        prepare(graph, Variant(mode, union, specs, specs[:1]))
        assert graph.written_buffers == (specs[:1] if absent else before.written_buffers)
        check_rules(graph, "prepare")
        added = (
            [g.parameter for g in before.gradients() if g.node.meta["val"].numel()]
            if mode == TOTAL
            else []
        )
        expected = [f"pending/{p}" for p in added] + [s.name for s in specs]
        assert [r.name for _, r in graph.inputs("state")] == list(dict.fromkeys(expected))
        forms = {g.parameter: g.node.meta["val"] for g in before.gradients()}
        for node, _ in graph.inputs("state"):
            own = forms.get(node.meta["state"].parameter)
            assert (
                node.meta["state"].kind == "pending"
                and node.meta["val"].dtype == node.meta["state"].dtype
            )
            assert own is None or (own.shape, own.dtype) == (
                node.meta["val"].shape,
                node.meta["val"].dtype,
            )
        _totals_right(before, graph, seed, set(added), specs)
        if not specs:
            assert (graph.fingerprint() != before.fingerprint()) == bool(added)
        _reduced_with_pending(graph, seed)

    search()


SHAPED = st.builds(
    Leaf, st.sampled_from(((), (2,), (2, 3), (0,))), st.sampled_from(("float32", "bfloat16"))
)


def _totals_right(
    before: TrainingGraph,
    graph: TrainingGraph,
    seed: int,
    added: set[str],
    specs: tuple[StateSpec, ...],
) -> None:
    given = dict(
        zip([r.name for _, r in graph.inputs()], random_inputs(graph, seed * 97), strict=True)
    )
    (old,), (new,) = trace([before], seed).results, trace([graph], seed).results
    assert len(new) == len(old) + len(specs)
    for at, _, role in before.outputs():
        adds = role.kind == "gradient" and role.name in added and old[at] is not None
        expected = old[at] + given[f"pending/{role.name}"] if adds else old[at]
        assert bitwise(new[at], expected), f"output {at} ({role}) is not the total"
    for spec, (at, _, role) in zip(specs, graph.outputs()[len(old) :], strict=True):
        assert role == Role("gradient", spec.parameter) and bitwise(new[at], given[spec.name])
    names = {n.name for n in before.graph.nodes}
    for node in graph.walk():
        if node.name not in names:
            origin = node.meta["provenance"]
            assert origin.pass_name == "accumulation" and origin.rule == "total"
            assert origin.source == node.args[0].name and len(origin.parameters) == 1
            assert node.name.startswith("total")
            assert node.prev is graph.behind(node.args[0]).prev or _only_totals_between(node)


def _only_totals_between(node: fx.Node) -> bool:
    """Whether a total stands behind its gradient, with nothing of the program in between."""
    at = node.prev
    while at is not node.args[0] and at.op != "placeholder":
        if not at.name.startswith("total"):
            return False
        at = at.prev
    return True


def _reduced_with_pending(graph: TrainingGraph, seed: int) -> None:
    environment = {
        "world": 2,
        "reduce": "sum",
        "reduce_dtype": None,
        "bucket_mb": 1.0,
        "group": "world",
        "layout": None,
    }
    run = run_over(GradientSync(), graph, environment, seed)
    check_rules(run.after, "gradient_sync", (reduced_once,))


def buffers_of_others(examples: int) -> None:
    """In a whole step, a buffer that it holds and only other ranks write becomes an output as it is, in the
    order of the union; one that it writes or does not hold becomes none.
    """

    @settings(examples)
    @given(whole_steps(), st.sets(st.integers(0, 3)), _ORDERS, SEEDS)
    def search(source: GradientGraph, unwritten: set[int], order: list[int], seed: int) -> None:
        graph, before = source.build(), source.build()
        for one in (graph, before):
            _only_read(one, {f"norm{i}.running" for i in unwritten})
        held = {role.name for _, role in before.inputs("buffer")}
        written = {role.name for _, _, role in before.outputs("mutation")}
        names = [f"norm{i}.running" for i in order]
        specs = tuple(
            StateSpec(BUFFER_STATE, name, (), torch.float32, torch.device("cpu")) for name in names
        )
        prepare(graph, Variant(union=Union((), ()), buffers=specs))
        check_rules(graph, "prepare")
        assert graph.written_buffers == specs
        outputs, own = graph.outputs(), len(before.outputs())
        added = [name for name in names if name in held - written]
        assert [role for _, _, role in outputs[own:]] == [Role("mutation", n) for n in added]
        values = zip(graph.inputs("buffer"), _buffers(graph, seed), strict=True)
        held_values = {role.name: value for (_, role), value in values}
        (old,), (new,) = trace([before], seed).results, trace([graph], seed).results
        assert len(new) == own + len(added)
        assert all(map(bitwise, new, [*old, *(held_values[name] for name in added)]))

    search()


_ORDERS = st.lists(st.integers(0, 4), max_size=5, unique=True)


def _buffers(graph: TrainingGraph, seed: int) -> list[Any]:
    given = zip(graph.inputs(), random_inputs(graph, seed * 97), strict=True)
    return [value for (_, role), value in given if role.kind == "buffer"]


def _only_read(graph: TrainingGraph, names: set[str]) -> None:
    """Take away the outputs that write these buffers."""
    kept = [(node, role) for _, node, role in graph.outputs()]
    kept = [(n, r) for n, r in kept if r.kind != "mutation" or r.name not in names]
    graph.output_node.args = (tuple(node for node, _ in kept),)
    graph.output_node.meta["roles"] = tuple(role for _, role in kept)
    graph.graph.eliminate_dead_code()


def layout_of_a_variant() -> None:
    """The agreed order is the union's; without one the graphs agree by themselves."""
    form = Form("a", (2,), "float32")
    assert Variant().layout is None and Variant(TOTAL, Union((), (form,))).layout == ()
    assert Variant(union=Union((form, Form("b", (), "float32")), ())).layout == ("a", "b")
