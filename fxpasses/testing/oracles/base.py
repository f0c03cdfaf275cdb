"""What oracles look at: a pass that ran, the graph before it, and the graphs that each rank has after it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.graph import StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report
from fxpasses.testing.sizes import AS_TRACED, Sizes, other_sizes
from fxpasses.testing.values import inputs_of_ranks
from fxpasses.testing.world import Launch, World, WorldError


class OracleFailure(AssertionError):
    """A pass did what it may not: names the oracle, the pass and the node."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """A graph on all ranks.

    Attributes:
        results: what each rank returned.
        launches: the collectives that were carried out (`launches[i][rank]`).
        given: copies of the first rank's inputs, as they were when it began.
        inputs: these inputs, as it left them.
        values: what each node of the first rank came to, by name.
    """

    results: list[tuple[Any, ...]]
    launches: list[list[Launch]]
    given: list[Any]
    inputs: list[Any]
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """A pass that ran over a graph, once on each rank.

    Attributes:
        passes: the pass, as each rank has it.
        before: the graph before; nothing may write to it.
        afters: the graph of each rank after its run.
        reports: what each run reported.
        provided: what holds now: by this pass and by those before it.
        seed: of the inputs.
        sizes: numbers for sizes that vary, in the inputs; as they were traced where there are none.
        other_sizes: numbers that these could take as well before the pass ran.
    """

    passes: tuple[Pass, ...]
    before: TrainingGraph
    afters: tuple[TrainingGraph, ...]
    reports: tuple[Report, ...]
    provided: frozenset[str] = frozenset()
    seed: int = 0
    sizes: Sizes = dataclasses.field(default_factory=dict)
    other_sizes: Sizes = dataclasses.field(default_factory=dict)

    @property
    def current(self) -> Pass:
        return self.passes[0]

    @property
    def after(self) -> TrainingGraph:
        return self.afters[0]

    @property
    def world(self) -> int:
        return len(self.passes)

    @functools.cached_property
    def traced_before(self) -> Trace:
        return trace([self.before] * self.world, self.seed, self.sizes)

    @functools.cached_property
    def traced_after(self) -> Trace:
        return trace(self.afters, self.seed, self.sizes)

    @functools.cached_property
    def lean_before(self) -> TrainingGraph:
        """`before` without dead code."""
        return lean(self.before)

    @functools.cached_property
    def lean_after(self) -> TrainingGraph:
        """`after` without dead code."""
        return lean(self.after)

    def again(self) -> Run:
        """The run of the same pass over what it made."""
        return run_pass(self.passes, self.after, self.provided, self.seed, separate=1)

    def at(self, sizes: Sizes) -> Run:
        """The same run, looked at with other sizes."""
        return dataclasses.replace(self, sizes=sizes)


Oracle = Callable[[Run], None]


def run_pass(
    passes: Sequence[Pass],
    graph: TrainingGraph,
    provided: frozenset[str] = frozenset(),
    seed: int = 0,
    separate: int = 2,
) -> Run:
    """Run a pass on each rank, over copies of a graph.

    Args:
        separate: how many ranks run it themselves where no rank's pass differs from another's; the others
            share what these made.
    """
    others = other_sizes(graph)
    runs: list[tuple[TrainingGraph, Report]] = []
    for position, current in enumerate(passes):
        if position >= separate and current == passes[0]:
            runs.append(runs[position % separate])
            continue
        after = graph.copy()
        runs.append((after, current.run_checked(after)))
    afters, reports = zip(*runs, strict=True)
    now = provided | passes[0].provides
    return Run(tuple(passes), graph, afters, reports, now, seed, other_sizes=others)


def trace(graphs: Sequence[TrainingGraph], seed: int, sizes: Sizes = AS_TRACED) -> Trace:
    """Run graphs, one for each rank, on random inputs."""
    inputs = inputs_of_ranks(graphs, seed, sizes)
    given = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs[0]]
    world = World(graphs, inputs)
    try:
        results = world.run()
        return Trace(results, world.launches, given, inputs[0], world.values(0))
    except WorldError as error:
        raise OracleFailure(f"oracle 'lock_step': {error}") from error


def lean(graph: TrainingGraph) -> TrainingGraph:
    """A copy without dead code."""
    copy = graph.copy()
    copy.eliminate_dead_code()
    return copy


def fail(oracle: str, run: Run, what: str, node: fx.Node | None = None) -> None:
    """Raise `OracleFailure` with all that it has to name."""
    where = f"node {node.name!r}: " if node is not None else ""
    told = f" (with {', '.join(f'{s} = {n}' for s, n in run.sizes.items())})" if run.sizes else ""
    raise OracleFailure(f"oracle {oracle!r}: pass {run.current.spec!r}: {where}{what}{told}")


def structure(graph: TrainingGraph) -> list[tuple[Any, ...]]:
    """The nodes of a graph without their names: equal for graphs that compute the same in the same way."""
    place = {node: f"%{i}" for i, node in enumerate(graph.graph.nodes)}
    rows = []
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), place.__getitem__)
        target = "" if node.op == "placeholder" else str(node.target)
        rows.append((node.op, target, _plain(args), _plain(kwargs)))
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _plain(v)) for k, v in value.items()))
    return str(value)


def state_of(graph: TrainingGraph) -> list[StateSpec]:
    """The state that a graph asks for."""
    return [node.meta["state"] for node, _ in graph.inputs("state")]
