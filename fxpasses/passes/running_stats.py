"""Let rank 0's running statistics travel with each backward, so that they stay alike on all ranks.

    before   (nothing)          after   running_mean ─┐
                                        running_var  ─┴▶ cat ─▶ broadcast ── … ──▶ wait ─▶ written back

Each rank's forward updates its buffers from its own batch, as under DistributedDataParallel, which then
broadcasts rank 0's in front of the next forward. Here the broadcast is launched at the start of the backward
and awaited at its end, hidden by the computation in between.

Before: a graph that knows which buffers its forward writes. After: one broadcast for each dtype and device of
these; the buffers are state inputs that the graph writes. Integers (`num_batches_tracked`) count alike on all
ranks by themselves.

A graph that holds the forward too (a whole step) broadcasts what it writes, behind the last gradient. Where
the ranks' graphs differ it does so behind all else, since each writes another buffer last, or none.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graph import StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class RunningStats(Pass):
    """Environment: `group`, the registered name of the process group; `layout`, given where the ranks' graphs
    differ.
    """

    group: str | None = from_environment("group")
    layout: tuple[str, ...] | None = from_environment("layout")

    name: ClassVar[str] = "running_stats"
    stage: ClassVar[str] = "backward"

    def has_work(self, graph: TrainingGraph) -> bool:
        return any(spec.dtype.is_floating_point for spec in graph.written_buffers)

    def run(self, graph: TrainingGraph) -> Report:
        specs = [s for s in graph.written_buffers if s.dtype.is_floating_point]
        groups = [list(g) for _, g in itertools.groupby(sorted(specs, key=_form), key=_form)]
        values = [[graph.buffer(spec) for spec in group] for group in groups]
        place = self._place(graph, [node for nodes in values for node in nodes])
        for index, (group, nodes) in enumerate(zip(groups, values, strict=True)):
            self._broadcast(graph, index, group, nodes, place)
        return Report(bool(groups), {"broadcasts": len(groups), "buffers": len(specs)})

    def _place(self, graph: TrainingGraph, values: list[fx.Node]) -> fx.Node:
        if graph.inputs("tangent"):
            return graph.first_call
        if self.layout is not None or not values:
            return graph.output_node
        positions = graph.positions()
        nodes = [*values, *(gradient.node for gradient in graph.gradients())]
        return graph.behind(max(nodes, key=positions.__getitem__))

    def _broadcast(
        self,
        graph: TrainingGraph,
        index: int,
        specs: list[StateSpec],
        values: list[fx.Node],
        before: fx.Node,
    ) -> None:
        launch: fx.Node = splice(
            graph,
            before,
            lambda xs: torch.ops._c10d_functional.broadcast(
                torch.cat([x.reshape(-1) for x in xs]), 0, self.group
            ),
            values,
            name=f"buffers{index}",
            provenance=Provenance(self.name, "launch"),
        )
        shapes = [spec.shape for spec in specs]
        news = splice(
            graph,
            graph.output_node,
            lambda x: [
                part.view(shape)
                for part, shape in zip(
                    torch.ops._c10d_functional.wait_tensor(x).split([s.numel() for s in specs]),
                    shapes,
                    strict=True,
                )
            ],
            launch,
            name=f"buffers{index}",
            provenance=Provenance(self.name, "finish"),
        )
        for spec, new in zip(specs, news, strict=True):
            graph.write_buffer(spec, new)


def _form(spec: StateSpec) -> tuple[str, str]:
    return str(spec.dtype), str(spec.device)
