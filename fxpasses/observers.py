"""Observers of the pipeline: the rules, and whoever else wants to look on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

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


Watcher = Callable[[GraphName], Sequence[Observer]]
# Of the process, not of a thread: backwards may be compiled in threads of autograd.
_watchers: list[Watcher] = []


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let observers look on wherever the backend runs passes meanwhile.

    Args:
        watcher: makes the observers of a graph; to it regions count from 0.
    """
    regions: dict[int, int] = {}

    def watch(name: GraphName) -> Sequence[Observer]:
        region = regions.setdefault(name.region, len(regions))
        return watcher(dataclasses.replace(name, region=region))

    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def watchers_of(name: GraphName) -> list[Observer]:
    """The observers that want to see this graph."""
    return [observer for watcher in _watchers for observer in watcher(name)]


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
        if self._signature is None:
            self._signature = spec.signature(graph)
        else:
            spec.check_signature(self._signature, graph, name)
            reorders = previous is not None and previous.made_by.reorders
            spec.check_effects(self._effects, graph, name, reorders)
        self._effects = spec.effects(graph)
        if previous is not None:
            if (fingerprint != self._fingerprint) != previous.report.changed:
                said = "a change" if previous.report.changed else "no change"
                raise spec.SpecError(f"after pass {name!r}: it reports {said}, which is not so")
            self._provided |= previous.made_by.provides
        if "reduced" in self._provided:
            spec.check(graph, name, (spec.reduced_once,))
        self._fingerprint = fingerprint
