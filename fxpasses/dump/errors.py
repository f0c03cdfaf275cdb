"""How much each pass changes what a graph computes, on random inputs and all ranks in this process.

A change is the largest difference of an element, relative to the largest element that outputs of that kind
(gradients, outputs, …) had before. A gradient that a pass reduces is compared with the mean, or sum, over the
ranks. State stands at its initial value and is not compared. A pass that is meant to change gradients, such as
`clip_norm`, shows how much it did.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fxpasses.distributed.group import is_initialized
from fxpasses.graph import TrainingGraph, copied
from fxpasses.observers import GraphName
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Done, Observer

_SHARED = ("parameter", "buffer")  # the same on all ranks


@dataclasses.dataclass(frozen=True)
class _Moment:
    """A copy of a graph, and the pass that made it."""

    done: Done | None
    graph: TrainingGraph


class Errors:
    """Watches graphs, and runs them when all passes are over."""

    def __init__(self) -> None:
        self._world = 1
        self._ranks: dict[tuple[int, str], dict[int, list[_Moment]]] = {}  # by region and graph

    def watch(self, name: GraphName) -> Observer:
        """The observer of one graph."""
        self._world = dist.get_world_size() if is_initialized() else 1
        moments: list[_Moment] = []
        self._ranks.setdefault((name.region, name.graph), {})[name.rank] = moments

        def observe(previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
            moments.append(_Moment(previous, TrainingGraph(copied(graph.module))))

        return observe

    def measured(self) -> dict[tuple[str, int], float]:
        """By graph and number of the pass, for passes that changed the graph.

        Raises:
            ValueError: where the graphs of some ranks have not been seen.
            WorldError: for collectives that differ, or can't be simulated.
        """
        found: dict[tuple[str, int], float] = {}
        for (region, graph), ranks in self._ranks.items():
            if len(ranks) != self._world:
                raise ValueError(
                    f"g{region}.{graph}: changes of results need the graphs of all {self._world} ranks, and "
                    f"{len(ranks)} ran here"
                )
            for number, change in self._changes(ranks):
                names = (str(GraphName(rank, region, graph)) for rank in ranks)
                found.update({(name, number): change for name in names})
        return found

    def _changes(self, ranks: dict[int, list[_Moment]]) -> Iterator[tuple[int, float]]:
        before: list[tuple[Any, ...]] = []
        for moments in zip(*(ranks[rank] for rank in sorted(ranks)), strict=True):
            done = moments[0].done
            if done is None or any(m.done is not None and m.done.report.changed for m in moments):
                now = self._run([moment.graph for moment in moments])
                if done is not None:
                    yield done.number, self._change(moments[0], before, now)
                before = now

    def _run(self, graphs: list[TrainingGraph]) -> list[tuple[Any, ...]]:
        from fxpasses.testing import run_world

        inputs = [_inputs(graph, rank) for rank, graph in enumerate(graphs)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # dropout drops the same before a pass and after it
            return run_world(graphs, inputs)

    def _change(
        self, moment: _Moment, before: list[tuple[Any, ...]], now: list[tuple[Any, ...]]
    ) -> float:
        assert moment.done is not None
        reduces = "reduced" in moment.done.made_by.provides
        mean = getattr(moment.done.made_by, "reduce", "mean") == "mean"
        differences: dict[str, float] = {}
        scales: dict[str, float] = {}
        for at, _, role in moment.graph.outputs():
            if role.kind == "state" or not _is_inexact(now[0][at]) or not now[0][at].numel():
                continue
            old = torch.stack([row[at].double() for row in before])
            if reduces and role.kind == "gradient":
                old = (old.mean(0) if mean else old.sum(0)).expand_as(old)
            difference = torch.stack([row[at].double() for row in now]) - old
            for largest, value in ((differences, difference), (scales, old)):
                largest[role.kind] = max(largest.get(role.kind, 0.0), value.abs().max().item())
        return max((d / (scales[kind] or 1.0) for kind, d in differences.items()), default=0.0)


def _inputs(graph: TrainingGraph, rank: int) -> list[Any]:
    """Random, weights as large as those of a new model."""
    from fxpasses.testing import random_inputs

    shared, own = random_inputs(graph, 0), random_inputs(graph, rank + 1)
    found: list[Any] = []
    for at, (node, role) in enumerate(graph.inputs()):
        if role.kind == "state":
            spec = node.meta["state"]
            found.append(torch.full(spec.shape, spec.fill, dtype=spec.dtype))
        else:
            found.append(shared[at] if role.kind in _SHARED else own[at])
            if role.kind == "parameter" and found[-1].dim() > 1:
                found[-1] *= math.sqrt(found[-1].shape[0] / found[-1].numel())
    return found


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
