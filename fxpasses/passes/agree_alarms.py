"""Let all ranks know of an alarm on one of them.

    before   alarm (state)            after   alarm ─▶ all_reduce max ─ … ─▶ wait ─▶ alarm (state)

Before: a backward that writes this rank's alarms. After: it writes those of all ranks, so that all of them
skip a step, or stop, together. Two integers, launched behind the last check and awaited last.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from fxpasses.graph import ALARM, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class AgreeAlarms(Pass):
    """Environment: `group` (registered name of the process group)."""

    group: str | None = from_environment("group")

    name: ClassVar[str] = "agree_alarms"
    stage: ClassVar[str] = "backward"
    preserves_numerics: ClassVar[bool] = True

    def has_work(self, graph: TrainingGraph) -> bool:
        return any(role.name == f"{ALARM}/" for _, _, role in graph.outputs("state"))

    def run(self, graph: TrainingGraph) -> Report:
        own = [(n, r.name) for _, n, r in graph.outputs("state") if r.name == f"{ALARM}/"]
        if not own:
            return Report(changed=False)
        ((alarm, name),) = own
        origin = Provenance(self.name, "agree")
        launch = splice(
            graph,
            graph.behind(alarm),
            lambda x: torch.ops._c10d_functional.all_reduce(x, "max", self.group),
            alarm,
            name="alarm",
            provenance=origin,
        )
        arrived = splice(
            graph,
            graph.output_node,
            torch.ops._c10d_functional.wait_tensor,
            launch,
            name="alarm",
            provenance=origin,
        )
        graph.write_state(name, arrived)
        return Report(True, {"collectives": 1})
