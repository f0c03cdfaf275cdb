"""The predicted schedule of a graph as bars on three tracks, for the page.

    {"ranks", "rates", "bars": [[track, start, duration, kind, bucket or null, [node, …]]]}      microseconds

They are what `fxpasses plan` plans with. Of a graph that holds forward and backward only the forward is shown:
the backward has a graph of its own.
"""

from __future__ import annotations

from typing import Any

from fxpasses.graph import TrainingGraph
from fxpasses.observers import GraphName
from fxpasses.schedule.build import build
from fxpasses.schedule.machine import Machine, machine_text
from fxpasses.schedule.plan import forward_of
from fxpasses.schedule.tasks import in_order, queued
from fxpasses.schedule.timeline import TRACKS, predicted


def chart_of(graph: TrainingGraph, name: GraphName, machine: Machine, world: int) -> dict[str, Any]:
    """The data of a chart.

    Args:
        name: of the graph.
        machine: what times are computed with.
        world: number of ranks.
    """
    halves = name.graph == "joint" and graph.inputs("tangent")
    program = (forward_of if halves else build)(graph, machine, world)
    slices = predicted(program, queued(program.tasks, in_order(program.tasks)))
    bars = [
        [
            TRACKS.index(one.track),
            round(1e6 * one.start, 3),
            round(1e6 * one.duration, 3),
            one.kind,
            one.bucket,
            one.nodes,
        ]
        for one in slices
    ]
    return {"ranks": world, "rates": machine_text(machine), "bars": bars}
