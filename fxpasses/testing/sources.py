"""What `check_pass` may be given to run a pass over: graphs as data, programs, graphs that are there."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

from fxpasses.graph import TrainingGraph
from fxpasses.testing.program import Program


@runtime_checkable
class Source(Protocol):
    """Makes a graph, and shows it."""

    def build(self) -> TrainingGraph: ...

    def source(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class _OfProgram:
    """The joint or backward graph of a program."""

    program: Program
    stage: str

    def build(self) -> TrainingGraph:
        return getattr(self.program.captured(), self.stage)

    def source(self) -> str:
        return self.program.source()


@dataclasses.dataclass(frozen=True)
class Exported:
    """What `torch.export` makes of a program, in training mode or in evaluation."""

    program: Program
    training: bool = True

    def build(self) -> TrainingGraph:
        return self.program.exported(self.training)

    def source(self) -> str:
        return f"{self.program.source()}\n# exported with model.train({self.training})"


@dataclasses.dataclass(frozen=True, eq=False)
class _Given:
    """A graph that is there."""

    graph: TrainingGraph

    def build(self) -> TrainingGraph:
        return self.graph

    def source(self) -> str:
        return str(self.graph.graph)


def source_of(found: Any, stage: str) -> Source:
    """What a strategy drew, as something that makes a graph.

    Args:
        found: a `TrainingGraph`, a `Program` (its graph of this stage), or what has `build()` and `source()`.

    Raises:
        ValueError: when it is something else.
    """
    if isinstance(found, Program):
        return _OfProgram(found, stage)
    if isinstance(found, TrainingGraph):
        return _Given(found)
    if isinstance(found, Source):
        return found
    raise ValueError(
        f"graphs: {found!r} was drawn; expected a `TrainingGraph`, a `Program`, or what has `build()`, which "
        "makes a `TrainingGraph`, and `source()`"
    )
