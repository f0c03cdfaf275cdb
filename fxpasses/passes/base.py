"""What a pass is: a frozen dataclass whose fields are its options, with a contract and a `run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from fxpasses.graph import StateSpec, TrainingGraph

STAGES = ("joint", "backward")
# What the process group decides, not the user. `layout`: names of all parameters that take part on some rank,
# in the order in which every rank sends them; None where the ranks' graphs agree by themselves. `levels`: of
# adaptive compression, which all ranks choose alike.
FROM_GROUP = ("group", "world", "rank", "layout", "levels")


@dataclasses.dataclass(frozen=True)
class Report:
    """What a pass did.

    Attributes:
        changed: whether the graph differs from what it was.
        counts: named figures for the listing, such as `{"buckets": 3, "bytes": 4096}`.
    """

    changed: bool
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


def from_environment(key: str) -> Any:
    """A field that, left at None, takes its value from the backend's options (`reduce`, `bucket_mb`, …) or
    from the process group (`group`, `world`, `rank`, `layout`, `levels`) when the pipeline is put together.
    """
    return dataclasses.field(default=None, metadata={"environment": key})


@dataclasses.dataclass(frozen=True)
class Pass:
    """Base class of passes. Subclass it as a frozen dataclass; the fields are the options.

    Class attributes:
        name: unique name, used in pipeline strings.
        stage: `"joint"` (forward and backward together) or `"backward"` (the graph that makes gradients).
        requires: what earlier passes must have provided.
        provides: what holds afterwards.
        conflicts: passes that can't stand in the same pipeline.
        local: whether the pass also runs in a backward that does not synchronise (`no_sync`, micro-batches
            but the last). Most don't: they deal with what is about to be reduced.
        reorders: whether the pass may move what passes have launched past what they await.
        preserves_numerics: whether results stay bitwise the same. If not, `error_bound` states the bound.
        inexact: kinds of outputs (`graph.OUTPUT_KINDS`) that the bound is about; all others stay bitwise.
        idempotent: whether a second run over what the first made changes no result.

    `tolerance` and `has_work` are what tests go by (`fxpasses.testing.check_pass`); no pipeline calls them.
    """

    name: ClassVar[str]
    stage: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()
    local: ClassVar[bool] = False
    reorders: ClassVar[bool] = False
    preserves_numerics: ClassVar[bool] = True
    inexact: ClassVar[frozenset[str]] = frozenset({"gradient"})
    idempotent: ClassVar[bool] = True

    def run(self, graph: TrainingGraph) -> Report:
        """Rewrite the graph in place."""
        raise NotImplementedError

    def forward_states(self, device: torch.device) -> tuple[StateSpec, ...]:
        """What a pass of the stage `joint` reads and writes across calls of a forward, all of it: it has to be
        known before the forward is traced. Passes of the stage `backward` ask when they run (`add_state`).
        """
        return ()

    def error_bound(self) -> str:
        """For passes that change numerics: the bound, in words and symbols, that its tests check."""
        assert self.preserves_numerics, f"pass {self.name!r} changes numerics and states no bound"
        return "bitwise"

    def tolerance(self, local: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The bound of `error_bound` as numbers: the largest error of each element of an output.

        The error is that against this rank's own value before the pass, or against the mean or sum over the
        ranks of a gradient, for a pass that provides `reduced`.

        Args:
            local: (ranks, *shape), what each rank's graph computes without the pass.
            out: shape, what this rank's computes with it; in the same dtype.

        Returns:
            Not negative, broadcast to shape; infinity where no bound holds.

        Raises:
            NotImplementedError: for a pass that changes numerics and does not define it.
        """
        if not self.preserves_numerics:
            raise NotImplementedError(
                f"pass {self.name!r} changes numerics: define `tolerance(self, local, out)`"
            )
        return torch.zeros(())

    def has_work(self, graph: TrainingGraph) -> bool | None:
        """Whether `run` will change this graph; None for a pass that does not say."""
        return None

    def bind(self, environment: Mapping[str, Any]) -> Self:
        """This pass with the fields that come from the environment filled in, as far as it has them."""
        missing = {
            field.metadata["environment"]
            for field in dataclasses.fields(self)
            if "environment" in field.metadata and getattr(self, field.name) is None
        }
        return self.replaced({k: v for k, v in environment.items() if k in missing})

    def replaced(self, environment: Mapping[str, Any]) -> Self:
        """This pass with fields that come from the environment, whatever they hold."""
        found = {
            field.name: environment[field.metadata["environment"]]
            for field in dataclasses.fields(self)
            if field.metadata.get("environment") in environment
        }
        return dataclasses.replace(self, **found)

    def run_checked(self, graph: TrainingGraph) -> Report:
        """`run`, whose result has to be a `Report`.

        Raises:
            ValueError: when it is something else.
        """
        report = self.run(graph)
        if not isinstance(report, Report):
            raise ValueError(
                f"pass {self.spec!r}: `run` returned {report!r}; expected a `Report(changed=...)`"
            )
        return report

    @property
    def communicates(self) -> bool:
        """Whether the pass needs a process group."""
        fields = dataclasses.fields(self)
        return any(field.metadata.get("environment") == "group" for field in fields)

    @property
    def spec(self) -> str:
        """The pipeline string that makes this pass: `bucketing{mb=25.0}`. Options at default are left out,
        and what the process group decides.
        """
        given = [
            f"{field.name}={_format(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
            and field.metadata.get("environment") not in FROM_GROUP
        ]
        return self.name + (f"{{{','.join(given)}}}" if given else "")


def _format(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
