"""Faults as nodes of the graph: what they do is written once, what is armed is state.

    before   mm ─▶ relu            after   mm ─▶ (bits & keep) ^ flip where armed ─▶ relu
                                           table (state) ──┘                 └─▶ news (state)

Before: a graph of a stage. After: each tensor that a fault of option `faults` may happen to passes through
operators which change nothing while its row in the table is zero. The table says which site,
element and bits are armed in this step; the news say what has been hit. So a campaign of any length has one
compilation, and what is not asked for is not in the graph.

Three passes, since phases are known at three places: `inject_forward` last on the joint graph, so that guards
read what was hit; `inject` on the backward, before gradients are bucketed, in local backwards too;
`inject_payload` behind whatever launches collectives.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from fxpasses.faults import models
from fxpasses.faults.injecting import Injecting, Shot, tables
from fxpasses.faults.sites import Site, gradient_sites, operator_sites, payload_sites
from fxpasses.faults.spec import BACKWARD, FORWARD, GRADIENT
from fxpasses.graph import DELIVERED, STALE, StateSpec, TrainingGraph
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class InjectForward(Injecting):
    """Faults of phase `forward`: results of operators."""

    name: ClassVar[str] = "inject_forward"
    stage: ClassVar[str] = "joint"

    def forward_states(self, device: torch.device) -> tuple[StateSpec, ...]:
        faults = self.parsed
        is_asked = any(fault.phase == FORWARD for fault in faults)
        return tables(len(faults), device) if is_asked else ()

    def sites(self, graph: TrainingGraph) -> list[tuple[fx.Node, Site]]:
        return operator_sites(graph, FORWARD)


@dataclasses.dataclass(frozen=True)
class Inject(Injecting):
    """Faults of the phases `backward` (results of operators) and `gradient` (before they are reduced)."""

    name: ClassVar[str] = "inject"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True

    def sites(self, graph: TrainingGraph) -> list[tuple[fx.Node, Site]]:
        # Gradients first: what is put on a node afterwards stands in front of what reads it.
        return gradient_sites(graph) + operator_sites(graph, BACKWARD)

    def strike(self, graph: TrainingGraph, node: fx.Node, shot: Shot) -> tuple[fx.Node, fx.Node]:
        if shot.site.phase != GRADIENT:
            return super().strike(graph, node, shot)
        indices = [g.index for g in graph.gradients() if g.node is node]
        readers = [reader for reader in node.users if DELIVERED in reader.meta]
        struck, heard = self.write(graph, graph.behind(node), node, shot)
        graph.set_outputs(dict.fromkeys(indices, struck))
        for reader in readers:
            reader.replace_input_with(node, struck)
        return struck, heard


@dataclasses.dataclass(frozen=True)
class InjectPayload(Injecting):
    """Faults of the phase `payload`: what this rank sends for others; `stale`, what comes back to it."""

    name: ClassVar[str] = "inject_payload"
    stage: ClassVar[str] = "backward"
    requires: ClassVar[frozenset[str]] = frozenset({"reduced"})

    def sites(self, graph: TrainingGraph) -> list[tuple[fx.Node, Site]]:
        return payload_sites(graph)

    def strike(self, graph: TrainingGraph, node: fx.Node, shot: Shot) -> tuple[fx.Node, fx.Node]:
        """Here the node is the launch."""
        if shot.fault.model == "stale":
            (wait,) = node.users
            return node, self._stale(graph, wait, shot)
        (payload,) = node.all_input_nodes
        struck, heard = self.write(graph, node, payload, shot)
        if "bucket" in payload.meta:
            struck.meta["bucket"] = payload.meta["bucket"]
        node.replace_input_with(payload, struck)
        return node, heard

    def _stale(self, graph: TrainingGraph, wait: fx.Node, shot: Shot) -> fx.Node:
        """Let a collective bring what it brought the time before."""
        site, number = shot.site, shot.number
        value = wait.meta["val"]
        shape = tuple(value.shape)
        spec = StateSpec(
            f"{STALE}{number}.{site.name}", site.parameters[0], shape, value.dtype, value.device
        )
        readers = list(wait.users)

        def late(new, old, rows):
            armed = rows[number, models.SITE] == site.number
            hits = armed.long()
            return torch.where(armed, old, new), torch.stack([hits, *[torch.zeros_like(hits)] * 3])

        late_node, heard = splice(
            graph,
            wait.next,
            late,
            wait,
            graph.add_state(spec),
            shot.rows,
            name=f"stale_{wait.name}",
            provenance=Provenance(self.name, "stale", site.name, site.model_line, site.parameters),
        )
        late_node.meta["fault"], late_node.meta["effect"] = site, f"fault at {site}"
        for reader in readers:
            reader.replace_input_with(wait, late_node)
        graph.write_state(spec.name, wait)
        return heard
