"""The graphs of a program as the backend would make them for a rank, without compiling code or communicating.

program, example inputs ─▶ Dynamo ─▶ Unit, passes included ─▶ regions; nodes of the forward run one by one
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.distributed.fake import fake_world
from fxpasses.dynamo import backend_errors_bare
from fxpasses.graph import TrainingGraph, copied
from fxpasses.observers import GraphName, Watcher, watching
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Done, Observer

_count = itertools.count()


@dataclasses.dataclass
class TracedGraph:
    """A graph of a region, before its passes and after them.

    Attributes:
        name: which one; regions count from 0 for each trace.
        before, after: copies.
        done: the passes that ran, and their reports.
    """

    name: GraphName
    before: TrainingGraph
    after: TrainingGraph
    done: list[Done] = dataclasses.field(default_factory=list)


def trace(
    program: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    *,
    world: int = 1,
    rank: int = 0,
    watcher: Watcher | None = None,
) -> list[TracedGraph]:
    """Run a program's forward once, and see the graphs that `backend="hardened"` makes of it.

    Each region that records a backward gives a graph `joint` and a graph `backward`, any other one `inference`.
    The graphs are those in front of Inductor, decomposed as for it.

    Args:
        program: a module, a function, or a whole step that calls `backward()` itself.
        args: its example inputs.
        options: those of the backend.
        world: number of ranks; more than one are simulated, by a process group that sends nothing.
        rank: which of them this is.
        watcher: looks on as well.

    Raises:
        ValueError: for wrong options, or a program that the backend refuses.
        SpecError: from a pass that breaks a rule.
    """
    from fxpasses import backend, inductor

    found: dict[GraphName, TracedGraph] = {}

    def keep(name: GraphName) -> list[Observer]:
        def observe(previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
            if name not in found:
                found[name] = TracedGraph(name, _copy(graph), graph)
            if previous is not None:
                found[name].done.append(previous)
            if following is None:
                found[name].after = _copy(graph)

        return [observe]

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm, inputs, unit = backend.make_unit(gm, example_inputs, options, inductor.decompositions())
        traced, states = inductor.trace_unit(gm, inputs, unit), unit.forward_states

        def run(*args: Any) -> Any:
            fresh = [torch.full(s.shape, s.fill, dtype=s.dtype, device=s.device) for s in states]
            outputs = traced(*args, *fresh)
            return outputs[: len(outputs) - len(states)]

        return run

    with (
        fake_world(world, rank),
        backend_errors_bare(),
        watching(keep),
        watching(watcher) if watcher else contextlib.nullcontext(),
        torch._dynamo.config.patch(trace_autograd_ops=True),
    ):
        torch.compile(_fresh(program), backend=compile_graph)(*args)
    return list(found.values())


def _copy(graph: TrainingGraph) -> TrainingGraph:
    return TrainingGraph(copied(graph.module), graph.decompositions)


def _fresh(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program in a code of its own: what Dynamo remembers, it remembers by the name of the code."""

    def call(*args: Any) -> Any:
        return program(*args)

    code = call.__code__.replace(co_name=f"trace_{next(_count)}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
