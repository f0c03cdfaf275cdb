"""Checksums of matrix products, in the graph.

    before   mm ─▶ …            after   mm ─┬▶ …
                                            └▶ row sums, against those of its factors ─▶ alarm (state)

Before: any graph. After: the same results, and a state that counts the products which are further from their
checksums than roundings go (`guards/products.py`). The reactions are at the end of the step. What a fault hits
behind a product, it hits in front of the check: the passes that inject faults come later and strike what both
read. What has no checksum (convolutions, fused attention) is counted as `unchecked`.

Two passes: `check_products` for the forward, on the joint graph; `check_gradient_products` for the backward,
in local ones too.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from fxpasses.faults.sites import forward_nodes
from fxpasses.graph import StateSpec, TrainingGraph
from fxpasses.guards.alarms import alarm_spec, place_of, write_alarms
from fxpasses.guards.products import checkable, is_wrong, parts, unchecked
from fxpasses.passes.base import Pass, Report
from fxpasses.rewrite import Provenance, model_line, splice


@dataclasses.dataclass(frozen=True)
class _Check(Pass):
    idempotent: ClassVar[bool] = False  # what is wrong would count twice

    def among(self, graph: TrainingGraph) -> set[fx.Node]:
        raise NotImplementedError

    def has_work(self, graph: TrainingGraph) -> bool:
        return bool(checkable(graph, self.among(graph)))

    def run(self, graph: TrainingGraph) -> Report:
        among = self.among(graph)
        products = checkable(graph, among)
        if not products:
            return Report(changed=False)
        rest = unchecked(graph, among)
        wrong = [(self._check(graph, node), place_of(node, "product")) for node in products]
        write_alarms(graph, self.name, wrong)
        return Report(True, {"checked": len(products), "unchecked": len(rest)})

    def _check(self, graph: TrainingGraph, node: fx.Node) -> fx.Node:
        return splice(
            graph,
            graph.behind(node),
            is_wrong,
            node,
            *parts(node),
            name=f"check_{node.name}",
            provenance=Provenance(self.name, "checksum", node.name, model_line(node)),
        )


@dataclasses.dataclass(frozen=True)
class CheckProducts(_Check):
    """The forward's products."""

    name: ClassVar[str] = "check_products"
    stage: ClassVar[str] = "joint"

    def forward_states(self, device: torch.device) -> tuple[StateSpec, ...]:
        return (alarm_spec(device),)

    def among(self, graph: TrainingGraph) -> set[fx.Node]:
        return forward_nodes(graph)


@dataclasses.dataclass(frozen=True)
class CheckGradientProducts(_Check):
    """The backward's products."""

    name: ClassVar[str] = "check_gradient_products"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True

    def among(self, graph: TrainingGraph) -> set[fx.Node]:
        return set(graph.walk()) - forward_nodes(graph)
