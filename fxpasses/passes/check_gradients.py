"""Gradients on their way from the operator that makes them to where they are packed.

    before   mm ─▶ gradient ─▶ bucket          after   mm ─┬▶ sum of its bits ─┐
                                                           └▶ gradient ─┬──────┴▶ changed? ─▶ alarm (state)
                                                                        └▶ bucket

Before: a backward whose gradients are this rank's own. After: the same results, and a state that counts the
gradients whose bits are no longer those that left their operator. Any flip in one element is found, in any
dtype. Whether the operator was right is another question (`check_gradient_products`, `check_sums`).

It comes before faults are injected, in local backwards too; its comparisons stand behind all else, so that they
see what the program gets, until `settle_checks` moves them to where gradients are packed.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

import custom_ops.bits
from fxpasses.graph import DELIVERED, TrainingGraph
from fxpasses.guards.alarms import write_alarms
from fxpasses.passes.base import Pass, Report
from fxpasses.rewrite import Provenance, model_line, splice


@dataclasses.dataclass(frozen=True)
class CheckGradients(Pass):
    """No options."""

    name: ClassVar[str] = "check_gradients"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True
    idempotent: ClassVar[bool] = False  # what is wrong would count twice

    def has_work(self, graph: TrainingGraph) -> bool:
        return bool(graph.parameters_by_gradient())

    def run(self, graph: TrainingGraph) -> Report:
        wrong = [
            (self._check(graph, node, parameters), f"bits of the gradient of {parameters[0]}")
            for node, parameters in graph.parameters_by_gradient().items()
        ]
        if not wrong:
            return Report(changed=False)
        write_alarms(graph, self.name, wrong)
        return Report(True, {"checked": len(wrong)})

    def _check(self, graph: TrainingGraph, node: fx.Node, parameters: tuple[str, ...]) -> fx.Node:
        origin = Provenance(self.name, "bits", node.name, model_line(node), parameters)
        name = f"check_{node.name}"
        total = splice(
            graph,
            graph.behind(node),
            custom_ops.bits.word_sum,
            node,
            name=name,
            provenance=origin,
        )
        changed: fx.Node = splice(
            graph,
            graph.output_node,
            torch.ops.fxpasses.changed,
            node,
            total,
            name=name,
            provenance=dataclasses.replace(origin, rule="checksum"),
        )
        changed.meta[DELIVERED] = True
        return changed
