"""How much each pass changes what a program computes, on random inputs and all ranks in this process.

A difference is the largest of an element, relative to the largest element that results of that kind (gradients,
outputs, …) have. There are two: the change, from what the graph computed in front of the pass, and the error,
from what the program computes as it is written: in fp32, unless it says otherwise itself. What is reduced is
compared with the mean, or sum, over the ranks. A backward reads what the forward behind all its passes saved:

    joint, as written ─▶ results, the reference
    joint, transformed ─▶ what it saves ─▶ backward, behind each of its passes ─▶ results

State stands at its initial value, a loss scale at some power of two; neither it nor buffers that are written
are compared. A pass that is meant to change gradients, such as `clip_norm`, shows how much it did.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fxpasses.distributed.group import resolve
from fxpasses.graph import SCALE_STATE, TrainingGraph, copied
from fxpasses.observers import GraphName
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Done, Observer

_SHARED = ("parameter", "buffer")  # the same on all ranks
_COMPARED = ("output", "gradient", "input_gradient")

Results = list[dict[tuple[str, str], torch.Tensor]]  # of each rank, by kind and name of the output


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much results behind a pass differ, relative to the largest of them.

    Attributes:
        change: from those in front of the pass.
        error: from those of the program as it is written; None for a backward whose joint graph was not seen,
            or does not have what it reads.
    """

    change: float
    error: float | None

    def data(self) -> dict[str, float | str | None]:
        """For JSON, which has no number for NaN and infinity: their names."""
        return {
            name: str(value) if value is not None and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(self).items()
        }


@dataclasses.dataclass(frozen=True)
class _Moment:
    """A copy of a graph, and the pass that made it."""

    done: Done | None
    graph: TrainingGraph


@dataclasses.dataclass(frozen=True)
class _Program:
    """What the joint graph of a region computes on each rank.

    Attributes:
        results: as the program is written.
        values: of all nodes behind the last pass, by name.
    """

    results: Results
    values: list[dict[str, Any]]


class Errors:
    """Watches graphs, and runs them when all passes are over."""

    def __init__(self) -> None:
        self._world = 1
        self._graphs: dict[
            tuple[int, str], dict[int, list[_Moment]]
        ] = {}  # by region, then by rank

    def watch(self, name: GraphName) -> Observer:
        """The observer of one graph."""
        self._world = resolve(None).size
        moments: list[_Moment] = []
        self._graphs.setdefault((name.region, name.graph), {})[name.rank] = moments

        def observe(previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
            moments.append(_Moment(previous, TrainingGraph(copied(graph.module))))

        return observe

    def measured(self) -> dict[tuple[str, int], Difference]:
        """By graph and number of the pass, for passes that changed the graph.

        Raises:
            ValueError: where the graphs of some ranks have not been seen.
            WorldError: for collectives that differ, or can't be simulated.
        """
        found: dict[tuple[str, int], Difference] = {}
        programs: dict[int, _Program] = {}
        for (region, graph), ranks in self._graphs.items():
            if len(ranks) != self._world:
                raise ValueError(
                    f"g{region}.{graph}: changes of results need the graphs of all {self._world} ranks, and "
                    f"{len(ranks)} ran here"
                )
            moments = list(zip(*(ranks[rank] for rank in sorted(ranks)), strict=True))
            for number, difference in _differences(moments, programs.get(region)):
                names = (str(GraphName(rank, region, graph)) for rank in ranks)
                found.update({(name, number): difference for name in names})
            if graph == "joint":
                programs[region] = _program(moments)
        return found


def _differences(
    moments: Sequence[tuple[_Moment, ...]], program: _Program | None
) -> Iterator[tuple[int, Difference]]:
    before: Results = []
    reference = program.results if program is not None and _reads(moments[0], program) else None
    is_first = program is None and not moments[0][0].graph.inputs("saved")
    for ranks in moments:
        done = ranks[0].done
        if done is not None and not any(
            m.done is not None and m.done.report.changed for m in ranks
        ):
            continue
        now, _ = _run(ranks, program)
        if done is None:
            if is_first:
                reference, is_first = now, False
        else:
            if "reduced" in done.made_by.provides:
                mean = getattr(done.made_by, "reduce", "mean") == "mean"
                before = _reduced(before, mean)
                reference = None if reference is None else _reduced(reference, mean)
            error = None if reference is None else _largest(reference, now)
            yield done.number, Difference(_largest(before, now), error)
        before = now


def _program(moments: Sequence[tuple[_Moment, ...]]) -> _Program:
    return _Program(_run(moments[0], None)[0], _run(moments[-1], None)[1])


def _reads(ranks: tuple[_Moment, ...], program: _Program) -> bool:
    """Whether the program's joint graph has all that these graphs read."""
    return all(
        role.name in values
        for moment, values in zip(ranks, program.values, strict=True)
        for _, role in moment.graph.inputs("saved")
    )


def _run(
    ranks: tuple[_Moment, ...], program: _Program | None
) -> tuple[Results, list[dict[str, Any]]]:
    """Results of all ranks, and the values of their nodes."""
    from fxpasses.testing import World

    graphs = [moment.graph for moment in ranks]
    values = program.values if program is not None else [{}] * len(graphs)
    inputs = [_inputs(graph, rank, values[rank]) for rank, graph in enumerate(graphs)]
    world = World(graphs, inputs)
    outputs = world.run()
    found = [{node.name: x for node, x in rank.env.items()} for rank in world.ranks]
    return [_results(graph, row) for graph, row in zip(graphs, outputs, strict=True)], found


def _results(graph: TrainingGraph, outputs: tuple[Any, ...]) -> dict[tuple[str, str], torch.Tensor]:
    found = {(role.kind, role.name): outputs[at] for at, _, role in graph.outputs()}
    return {k: x for k, x in found.items() if k[0] in _COMPARED and _is_inexact(x)}


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _reduced(results: Results, mean: bool) -> Results:
    """With gradients as they are over all ranks."""
    reduce = torch.mean if mean else torch.sum
    shared = {
        key: reduce(torch.stack([row[key].double() for row in results]), 0)
        for key in results[0]
        if key[0] == "gradient"
    }
    return [{**row, **shared} for row in results]


def _largest(old: Results, new: Results) -> float:
    """The largest difference, relative to the largest element that results of its kind had; of all kinds."""
    differences: dict[str, float] = {}
    scales: dict[str, float] = {}
    for before, after in zip(old, new, strict=True):
        for key in before.keys() & after.keys():
            was = before[key].double()
            for largest, x in ((differences, after[key].double() - was), (scales, was)):
                largest[key[0]] = _larger(largest.get(key[0], 0.0), x.abs().max().item())
    return functools.reduce(_larger, (d / (scales[k] or 1.0) for k, d in differences.items()), 0.0)


def _larger(a: float, b: float) -> float:
    """The larger of two numbers; NaN, if one of them is."""
    return b if b > a or math.isnan(b) else a


def _inputs(graph: TrainingGraph, rank: int, values: Mapping[str, Any]) -> list[Any]:
    """What was saved, or random: weights as large as those of a new model, tangents as those of a mean."""
    from fxpasses.testing import random_inputs

    shared, own = random_inputs(graph, 0), random_inputs(graph, rank + 1)
    found: list[Any] = []
    for at, (node, role) in enumerate(graph.inputs()):
        spec = node.meta.get("state")
        if spec is not None and spec.kind == SCALE_STATE:  # which the scaler sets, not the graph
            found.append(shared[at])
        elif spec is not None:
            found.append(torch.full(spec.shape, spec.fill, dtype=spec.dtype))
        elif role.kind == "saved" and role.name in values:
            found.append(values[role.name])
        else:
            found.append(shared[at] if role.kind in _SHARED else own[at])
            if role.kind == "parameter" and found[-1].dim() > 1:
                found[-1] = found[-1] * math.sqrt(found[-1].shape[0] / found[-1].numel())
            elif role.kind == "tangent" and _is_inexact(found[-1]):
                found[-1] = found[-1] / found[-1].numel()
    return found
