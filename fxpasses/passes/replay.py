"""Modules whose operators are computed again, alone, where one of their checks fails.

    before   x ─▶ module ─▶ y            after   x ─▶ ⟳ module ─▶ y
                     └▶ wrong? ─▶ alarm (state)           ├▶ still wrong? ─▶ alarm (state)
                                                          └▶ ran twice? ─▶ replayed (state)

Before: a graph with checks. After: the operators of each module that `region` of option `guards` selects
stand in a loop (`guards/loops.py`) that ends after one round unless a check fails, and after two. Results are
those of the last round. Nothing else runs again, and no collective.

Two passes: `replay_forward` last on the joint graph, behind the faults that strike it; `replay_backward` behind
those of the backward, before gradients are packed, in local backwards too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import ClassVar

import torch
from torch import fx

from fxpasses.faults.sites import forward_nodes
from fxpasses.faults.spec import parse_faults
from fxpasses.graph import REPLAYED, StateSpec, TrainingGraph
from fxpasses.guards.alarms import alarm_spec, write_alarms
from fxpasses.guards.loops import write_loop
from fxpasses.guards.option import parse_guards
from fxpasses.guards.regions import Region, note_modules, regions_of
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import LOOPED, Provenance, wanted


@dataclasses.dataclass(frozen=True)
class _Replay(Pass):
    """Environment: `guards`, whose `region` is the pattern of modules; `faults`, of which stuck ones are there
    in the second round too.
    """

    guards: str | None = from_environment("guards")
    faults: str | None = from_environment("faults")

    # What depends on a region comes behind all of it, a fault on its gradient among it.
    reorders: ClassVar[bool] = True

    def among(self, graph: TrainingGraph) -> Collection[fx.Node]:
        raise NotImplementedError

    def regions(self, graph: TrainingGraph) -> list[Region]:
        pattern = parse_guards(self.guards or "").region
        found = regions_of(graph, pattern, self.among(graph))
        return [region for region in found if region.is_checked]

    def has_work(self, graph: TrainingGraph) -> bool:
        return bool(self.regions(graph))

    def run(self, graph: TrainingGraph) -> Report:
        note_modules(graph)
        regions = [r for r in self.regions(graph) if wanted(Provenance(self.name, LOOPED, r.name))]
        if not regions:
            return Report(changed=False)
        stuck = [fault.model == "stuck" for fault in parse_faults(self.faults or "")]
        replayed = [
            (write_loop(graph, region, self.name, stuck), f"region: {region.name}")
            for region in regions
        ]
        write_alarms(graph, self.name, replayed, REPLAYED)
        return Report(True, {"regions": len(regions), "nodes": sum(len(r.nodes) for r in regions)})


@dataclasses.dataclass(frozen=True)
class ReplayForward(_Replay):
    """The forward's."""

    name: ClassVar[str] = "replay_forward"
    stage: ClassVar[str] = "joint"

    def forward_states(self, device: torch.device) -> tuple[StateSpec, ...]:
        return (alarm_spec(device, REPLAYED),)

    def among(self, graph: TrainingGraph) -> Collection[fx.Node]:
        return forward_nodes(graph)


@dataclasses.dataclass(frozen=True)
class ReplayBackward(_Replay):
    """The backward's."""

    name: ClassVar[str] = "replay_backward"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True

    def among(self, graph: TrainingGraph) -> Collection[fx.Node]:
        # Not what the partitioner lets a backward compute anew of the forward: others read that first.
        return {node for node in graph.walk() if node.meta.get("fwd_nn_module_stack")}
