"""Observers of the pipeline: the rules, the dump, the clock."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fxpasses import spec
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Done, Observer


@dataclasses.dataclass(frozen=True)
class GraphName:
    """Which graph it is that passes run over.

    Attributes:
        rank: global rank of this process.
        region: number of the region that Dynamo handed over, in the order of compilation.
        graph: `"joint"`, `"backward"`, `"inference"`, or a variant of a backward (`"backward-local"`).
    """

    rank: int
    region: int
    graph: str

    def __str__(self) -> str:
        return f"rank{self.rank}/g{self.region}.{self.graph}"


Watcher = Callable[[GraphName], Observer]
# Of the process, not of a thread: backwards may be compiled in threads of autograd.
_watchers: list[Watcher] = []


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let an observer look on wherever the backend runs passes meanwhile.

    Args:
        watcher: makes the observer of a graph.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def watchers_of(name: GraphName) -> list[Observer]:
    """The observers that want to see this graph."""
    return [watcher(name) for watcher in _watchers]


class CheckRules:
    """Checks the graph before the first pass and after each one.

    Raises:
        SpecError: naming pass, rule and node; also for a pass that says it changed nothing and did.
    """

    def __init__(self) -> None:
        self._provided: frozenset[str] = frozenset()
        self._signature: list[tuple[object, ...]] | None = None
        self._effects: list[str] = []
        self._fingerprint = ""

    def __call__(self, previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        name = previous.made_by.name if previous else "(input)"
        spec.check(graph, name)
        fingerprint = graph.fingerprint()
        if self._signature is None or previous is None:
            self._signature = spec.signature(graph)
        else:
            spec.check_signature(self._signature, graph, name)
            spec.check_effects(self._effects, graph, name, previous.made_by.reorders)
        self._effects = spec.effects(graph)
        if previous is not None:
            if (fingerprint != self._fingerprint) != previous.report.changed:
                said = "a change" if previous.report.changed else "no change"
                raise spec.SpecError(f"after pass {name!r}: it reports {said}, which is not so")
            self._provided |= previous.made_by.provides
        if "reduced" in self._provided:
            spec.check(graph, name, (spec.reduced_once,))
        self._fingerprint = fingerprint


class Dump:
    """Writes the graph as text after each pass: `FOLDER/00-input.py`, `FOLDER/01-bucketing.py`, …

    Names hold no clock and no process id, so that two runs write the same files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(self, previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        name = previous.made_by.name if previous else "input"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._count:02d}-{name}.py"
        path.write_text(text(previous, graph))
        self._count += 1


class Clock:
    """Seconds that each pass took, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = 0.0

    def __call__(self, previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        if previous is not None:
            self.seconds[previous.made_by.name] = time.perf_counter() - self._started
        self._started = time.perf_counter()


def text(previous: Done | None, graph: TrainingGraph) -> str:
    """A graph as Python, headed by the pass that made it (none: the input), its inputs and its outputs."""
    if previous is None:
        head = "# input of the pipeline"
    else:
        counts = ", ".join(f"{k}={v}" for k, v in previous.report.counts.items())
        changed = counts or ("changed" if previous.report.changed else "unchanged")
        head = f"# after {previous.made_by.spec}: {changed}"
    inputs = "\n".join(f"# input {n.name}: {r.kind} {r.name}" for n, r in graph.inputs())
    outputs = "\n".join(f"# output {i}: {r.kind} {r.name} = {n}" for i, n, r in graph.outputs())
    code = graph.graph.python_code("self", verbose=False).src
    return f"{head}\n{inputs}\n{outputs}\n{code}"
