"""Graphs run once more on the inputs that they had, some of them changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fxpasses.graph import Role, TrainingGraph
from fxpasses.testing.oracles import Run
from fxpasses.testing.values import inputs_of_ranks
from fxpasses.testing.world import run_world

Change = Callable[
    [int, Role, Any], Any
]  # makes a value from its rank, its role and the first run's


def changed_inputs(run: Run, graphs: Sequence[TrainingGraph], change: Change) -> list[list[Any]]:
    """Of each rank, in order."""
    return [
        [change(rank, role, value) for (_, role), value in zip(graph.inputs(), row, strict=True)]
        for rank, (graph, row) in enumerate(
            zip(graphs, inputs_of_ranks(graphs, run.seed), strict=True)
        )
    ]


def again(run: Run, graphs: Sequence[TrainingGraph], change: Change) -> list[tuple[Any, ...]]:
    """The outputs of each rank."""
    return run_world(graphs, changed_inputs(run, graphs, change))
