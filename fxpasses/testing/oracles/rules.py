"""Oracles of form: rules, signature, reports, provenance."""

from __future__ import annotations

from typing import Any

import torch

from fxpasses import spec
from fxpasses.effects import is_launch
from fxpasses.graph import TrainingGraph
from fxpasses.rewrite import Provenance
from fxpasses.testing.oracles.base import Run, fail, structure


def rules_hold(run: Run) -> None:
    """The rules of `fxpasses.spec`; that each gradient is reduced once, as soon as a pass provides it."""
    rules = spec.ALWAYS + ((spec.reduced_once,) if "reduced" in run.provided else ())
    for rule in rules:
        for graph in run.afters:
            for node, what in rule(graph):
                fail(f"rules_hold/{rule.__name__}", run, what, node)


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
    for name, count in run.reports[0].counts.items():
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
        (str(n.target), str(n.args[1:]), _form(n.args[0])) for n in graph.walk() if is_launch(n)
    ]


def _form(node: Any) -> str:
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
    """State is named by what it is and whose; fakes are what it says; what was there stays."""
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
        known.discard(role.name)
    if known:
        fail("state_sound", run, f"state {sorted(known)} is gone")


def fakes_true(run: Run) -> None:
    """What a node's fake value says of shape, dtype and strides is what comes out when the graph runs; but
    where torch's own fakes were not true before.
    """
    for at, value, role in run.after.outputs():
        untrue = _untrue(value, run.traced_after.results[0][at])
        if untrue and not _was_untrue(run, at):
            said, is_so = untrue
            fail(
                "fakes_true",
                run,
                f"output {at} ({role.kind} {role.name}): {said}, is {is_so}",
                value,
            )


def _was_untrue(run: Run, at: int) -> bool:
    outputs = run.before.outputs()
    if at >= len(outputs):
        return False
    return _untrue(outputs[at][1], run.traced_before.results[0][at]) is not None


def _untrue(value: Any, real: Any) -> tuple[Any, Any] | None:
    """What a node says of its value and what is so, where that differs."""
    if not isinstance(real, torch.Tensor):
        return None
    fake = value.meta["val"]
    if any(isinstance(s, torch.SymInt) for s in (*fake.shape, *fake.stride())):
        return None
    said, is_so = ((x.dtype, tuple(x.shape), _strides(x)) for x in (fake, real))
    return None if said == is_so else (said, is_so)


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """Strides as far as they matter."""
    if value.numel() == 0:
        return ()
    return tuple(t for s, t in zip(value.shape, value.stride(), strict=True) if s > 1)
