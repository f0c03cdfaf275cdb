"""Oracles of structure: effects, the dump, memory."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.overrides import TorchFunctionMode

from fxpasses.dump.folder import Dump
from fxpasses.effects import is_effectful
from fxpasses.graph import TrainingGraph
from fxpasses.pipeline import Done
from fxpasses.testing.oracles.base import Run, Trace, fail, lean, run_pass, structure, trace
from fxpasses.testing.oracles.numerics import bitwise


def effects_survive(run: Run) -> None:
    """Eliminating dead code keeps every node with an effect, those that were there before too, and results."""
    before = [str(n.target) for n in run.before.walk_deep() if is_effectful(n)]
    after = [str(n.target) for n in run.after.walk_deep() if is_effectful(n)]
    for target in set(before):
        if after.count(target) < before.count(target):
            fail("effects_survive", run, f"a call of {target} is gone")
    if [str(n.target) for n in run.lean_after.walk_deep() if is_effectful(n)] != after:
        fail("effects_survive", run, "eliminating dead code drops or moves effects")
    if len(run.lean_after.graph.nodes) == len(run.after.graph.nodes):
        return
    lean_trace = trace([run.lean_after, *map(lean, run.afters[1:])], run.seed, run.sizes)
    if not _same(lean_trace.results[0], run.traced_after.results[0]):
        fail("effects_survive", run, "eliminating dead code changes results")


def no_dead_code(run: Run) -> None:
    """A pass leaves nothing behind that nobody needs: of its own, or because it took the last use away.

    Where there was such code before, what counts is what it makes of the graph without that.
    """
    if _gone(run.before, run.lean_before):
        run = run_pass(run.passes, run.lean_before, run.provided, run.seed, separate=1)
    idle = _gone(run.after, run.lean_after)
    for node in run.after.walk():
        if node.name in idle:
            fail("no_dead_code", run, "is left and nothing uses it", node)


def _gone(graph: TrainingGraph, kept: TrainingGraph) -> set[str]:
    return {n.name for n in graph.walk()} - {n.name for n in kept.walk()}


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(bitwise(x, y) for x, y in zip(a, b, strict=True))


def dump_reads_back(run: Run) -> None:
    """The dumped text is Python that makes the same graph, and describes its inputs and outputs.

    The text of a graph that calls others (`torch.cond`) only names these; there it has to be Python, no more.
    """
    text, graph = dumped(run), run.after
    calls_graphs = bool(graph.graph.find_nodes(op="get_attr"))
    ours = structure(graph)
    theirs = ours if calls_graphs else structure(TrainingGraph(parsed(text)))
    compile(text, "<dump>", "exec")
    for old, new in zip(ours, theirs, strict=False):
        if old != new:
            fail("dump_reads_back", run, f"{old} became {new}")
    if len(ours) != len(theirs):
        fail("dump_reads_back", run, f"{len(ours)} nodes became {len(theirs)}")
    for node, role in graph.inputs():
        if f"  input {node.name}: {role.kind} {role.name}\n" not in text:
            fail("dump_reads_back", run, "is an input that the dump does not describe", node)
    for at, value, role in graph.outputs():
        if f"# output {at}: {role.kind} {role.name} = {value}\n" not in text:
            fail("dump_reads_back", run, f"output {at} is not described by the dump", value)


def dumped(run: Run) -> str:
    """What an observer writes of a graph."""
    with tempfile.TemporaryDirectory() as folder:
        Dump(Path(folder))(Done(run.current, run.reports[0]), None, run.after)
        (path,) = Path(folder).glob("*.py")
        return path.read_text()


def parsed(text: str) -> fx.GraphModule:
    """Run dumped text and trace the function that it defines."""
    namespace = {
        "torch": torch,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
    }
    exec(compile(text, "<dump>", "exec"), namespace)
    root = type("Dumped", (torch.nn.Module,), {"forward": namespace["forward"]})()
    tracer = fx.Tracer()
    with _RecordConstants(tracer):
        return fx.GraphModule(root, tracer.trace(root))


class _RecordConstants(TorchFunctionMode):
    """Operators that read no tensor become nodes as well; tracing by itself would run them."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        traced = any(isinstance(leaf, fx.Proxy) for leaf in leaves)
        if traced or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs or {})
        return self._tracer.create_proxy("call_function", func, args, kwargs or {})


def memory_kept(run: Run) -> None:
    """What the graph writes and shares stays so: inputs keep their values unless they were written before,
    and outputs share memory with each other, or with an input, only if they did before. Gradients, and what
    a pass may change, need not share it any longer.
    """
    was_written, was_shared = _memory(run.before, run.traced_before)
    now_written, now_shared = _memory(run.after, run.traced_after)
    if was_written != now_written:
        fail(
            "memory_kept", run, f"writes inputs {sorted(now_written)}, before {sorted(was_written)}"
        )
    kinds = {("output", at): role.kind for at, _, role in run.before.outputs()}
    gone = {
        pair
        for pair in was_shared - now_shared
        if not any(kinds.get(x) in {"gradient", *run.current.inexact} for x in pair)
    }
    added = {pair for pair in now_shared - was_shared if not any(x[0] == "state" for x in pair)}
    if added or gone:
        fail(
            "memory_kept",
            run,
            f"shared memory: added {sorted(map(sorted, added))}, gone {sorted(map(sorted, gone))}",
        )


def _memory(
    graph: TrainingGraph, traced: Trace
) -> tuple[set[str], set[frozenset[tuple[str, Any]]]]:
    """Names of inputs that the first rank's run writes, and pairs of inputs and outputs that share memory."""
    inputs, results = traced.inputs, traced.results[0]
    written = {
        role.name
        for (_, role), old, new in zip(graph.inputs(), traced.given, inputs, strict=True)
        if not bitwise(old, new)
    }
    named: list[tuple[tuple[str, Any], Any]] = [
        (("state" if role.kind == "state" else "input", role.name), value)
        for (_, role), value in zip(graph.inputs(), inputs, strict=True)
    ]
    named += [
        (("state" if role.kind == "state" else "output", at), results[at])
        for at, _, role in graph.outputs()
    ]
    shared = {
        frozenset({a, b})
        for i, (a, x) in enumerate(named)
        for b, y in named[i + 1 :]
        if _overlap(x, y)
    }
    return written, shared


def _overlap(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if not (a.numel() and b.numel()) or a.data_ptr() == 0:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (a_first, a_end), (b_first, b_end) = _extent(a), _extent(b)
    return a_first < b_end and b_first < a_end


def _extent(value: torch.Tensor) -> tuple[int, int]:
    last = sum((s - 1) * t for s, t in zip(value.shape, value.stride(), strict=True))
    first = value.data_ptr()
    return first, first + (last + 1) * value.element_size()
