"""Oracles of form: rules, signature, reports, provenance."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxpasses import spec
from fxpasses.effects import is_launch
from fxpasses.graph import TrainingGraph
from fxpasses.rewrite import Provenance
from fxpasses.testing.oracles.base import Run, fail, structure
from fxpasses.testing.sizes import AS_TRACED, Sizes, number


def rules_hold(run: Run) -> None:
    """The rules of `fxpasses.spec`; that each gradient is reduced once, as soon as a pass provides it; that
    effects stay in their order, unless the pass says that it may move those of passes.
    """
    rules = spec.ALWAYS + ((spec.reduced_once,) if "reduced" in run.provided else ())
    for rule in rules:
        for graph in run.afters:
            for node, what in rule(graph):
                fail(f"rules_hold/{rule.__name__}", run, what, node)
    for graph in run.afters:
        for old, new in spec.moved_effects(spec.effects(run.before), graph, run.current.reorders):
            fail("rules_hold/effects", run, f"{old!r} was removed, or moved past {new!r}")


def signature_kept(run: Run) -> None:
    """Inputs and outputs that are not state keep role, order, shape, dtype and device."""
    before, after = spec.signature(run.before), spec.signature(run.after)
    for old, new in zip(before, after, strict=False):
        if old != new:
            fail("signature_kept", run, f"{old} became {new}")
    if len(before) != len(after):
        fail("signature_kept", run, f"{len(before)} inputs and outputs became {len(after)}")


def report_honest(run: Run) -> None:
    """`report.changed` exactly if the graph differs, and as stated if the pass states when it has work."""
    differs = run.before.fingerprint() != run.after.fingerprint()
    changed = run.reports[0].changed
    if changed != differs:
        fail("report_honest", run, f"reports changed={changed}, but the graph {_differs(differs)}")
    expected = run.current.has_work(run.before)
    if expected is not None and expected != differs:
        fail("report_honest", run, f"has_work is {expected}, but the graph {_differs(differs)}")
    counts = run.reports[0].counts
    if not isinstance(counts, Mapping):
        fail("report_honest", run, f"counts are {counts!r}; expected numbers by name")
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            fail("report_honest", run, f"counts {name}={count!r}; expected a whole number")


def _differs(differs: bool) -> str:
    return "differs" if differs else "is as it was"


def same_on_all_ranks(run: Run) -> None:
    """Ranks with the same options make the same graph, and all launch the same collectives in one order."""
    for rank in range(1, run.world):
        if run.passes[rank] == run.current:
            first, other = structure(run.after), structure(run.afters[rank])
            for a, b in zip(first, other, strict=False):
                if a != b:
                    fail("same_on_all_ranks", run, f"rank 0 has {a}, rank {rank} has {b}")
            if len(first) != len(other) or run.reports[rank] != run.reports[0]:
                fail("same_on_all_ranks", run, f"rank {rank} has another graph or report")
        if _launches(run.after) != _launches(run.afters[rank]):
            fail("same_on_all_ranks", run, f"rank {rank} launches other collectives than rank 0")


def _launches(graph: TrainingGraph) -> list[tuple[Any, ...]]:
    return [
        (str(n.target), str(n.args[1:]), _payload(n.args[0])) for n in graph.walk() if is_launch(n)
    ]


def _payload(node: Any) -> str:
    value = node.meta["val"]
    return f"{value.dtype}{list(value.shape)}"


def collectives_explained(run: Run) -> None:
    """A new launch says which pass wrote it; those that reduce name each parameter once, over the graph.

    Plan, agreement and the optimizer's check go by these.
    """
    known = {node.name for node in run.before.graph.nodes}
    groups: set[tuple[str, ...]] = set()  # a bucket may travel in two parts
    for node in run.after.walk():
        if not is_launch(node) or node.name in known:
            continue
        origin = node.meta.get("provenance")
        if not isinstance(origin, Provenance) or origin.pass_name != run.current.name:
            fail("collectives_explained", run, f"has provenance {origin}", node)
        elif node.meta.get("reduces"):
            groups.add(origin.parameters)
    if "reduced" in run.current.provides:
        expected = [g.parameter for g in run.after.gradients() if g.node.meta["val"].numel()]
        named = [name for group in groups for name in group]
        if sorted(named) != sorted(expected):
            what = f"launches that reduce name {sorted(named)}, gradients are {sorted(expected)}"
            fail("collectives_explained", run, what)


def state_sound(run: Run) -> None:
    """State is named by what it is and whose; fakes are what it says; what was there stays; what a pass of the
    stage `joint` adds is what its `forward_states` names.
    """
    known = {role.name for _, role in run.before.inputs("state")}
    for node, role in run.after.inputs("state"):
        declared = node.meta.get("state")
        if declared is None or declared.name != role.name:
            fail("state_sound", run, f"is state {role.name!r} declared as {declared}", node)
        assert declared is not None
        value = node.meta["val"]
        if (tuple(value.shape), value.dtype) != (declared.shape, declared.dtype):
            fail(
                "state_sound", run, f"holds {value.dtype}{list(value.shape)}, not {declared}", node
            )
        is_new = run.current.stage == "joint" and role.name not in known
        if is_new and declared not in run.current.forward_states(declared.device):
            fail("state_sound", run, f"is state {role.name!r}, not in `forward_states`", node)
        known.discard(role.name)
    if known:
        fail("state_sound", run, f"state {sorted(known)} is gone")


def fakes_true(run: Run) -> None:
    """What a node's fake value says of shape, dtype and strides is what comes out when the graph runs; but
    where torch's own fakes are not true.
    """
    for node in run.after.graph.nodes:
        values = (node.meta.get("val"), run.traced_after.values.get(node.name))
        said, is_so = (_form(value, run.sizes) for value in values)
        if said and is_so and said != is_so and not _torch_says(run.after, node, said):
            fail("fakes_true", run, f"its fake value is {said}, what comes out is {is_so}", node)


def _torch_says(graph: TrainingGraph, node: fx.Node, said: tuple[Any, ...]) -> bool:
    """Whether the operator's own fake is what a node says, given those that it reads."""
    if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
    target: Callable[..., Any] = node.target
    with graph.fake_mode:
        return _form(target(*args, **kwargs)) == said


def _form(value: Any, sizes: Sizes = AS_TRACED) -> tuple[Any, ...]:
    """Dtype, shape, and strides as far as they matter; nothing of what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return ()
    shape, strides = ([number(x, sizes) for x in xs] for xs in (value.shape, value.stride()))
    if 0 in shape:
        return value.dtype, tuple(shape), ()
    kept = tuple(t for s, t in zip(shape, strides, strict=True) if s > 1)
    return value.dtype, tuple(shape), kept
