"""Gradients on their way from the operator that makes them to where they are packed.

    before   mm ─▶ gradient ─▶ bucket          after   mm ─┬▶ sum of its bits ─┐
                                                           └▶ gradient ─┬──────┴▶ changed? ─▶ alarm (state)
                                                                        └▶ bucket

Before: a backward whose gradients are this rank's own. After: the same results, and a state that counts the
gradients whose bits are no longer those that left their operator. Any flip in one element is found, in any
dtype. Whether the operator was right is another question (`check_gradient_products`, `check_sums`).

Two passes. `check_gradients` comes before faults are injected, in local backwards too; its comparisons stand
behind all else, so that they see what the program gets. Where gradients are packed and sent, `settle_checks`
lets each comparison stand behind the launch of its bucket: the memory of a gradient is not held for longer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

import custom_ops.bits
from fxpasses.effects import is_launch
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

    def has_work(self, graph: TrainingGraph) -> bool:
        return bool(_checked(graph))

    def run(self, graph: TrainingGraph) -> Report:
        wrong = [
            (self._check(graph, node, parameters), f"bits of the gradient of {parameters[0]}")
            for node, parameters in _checked(graph).items()
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


@dataclasses.dataclass(frozen=True)
class SettleChecks(Pass):
    """No options."""

    name: ClassVar[str] = "settle_checks"
    stage: ClassVar[str] = "backward"
    requires: ClassVar[frozenset[str]] = frozenset({"reduced"})

    def has_work(self, graph: TrainingGraph) -> bool:
        return bool(_moves(graph))

    def run(self, graph: TrainingGraph) -> Report:
        moves = _moves(graph)
        for comparison, launch in reversed(moves):
            _sum_at_once(graph, comparison)
            launch.append(comparison)
        return Report(bool(moves), {"settled": len(moves)})


def _checked(graph: TrainingGraph) -> dict[fx.Node, tuple[str, ...]]:
    """The gradients that have bits, each node once, whosesoever it is."""
    found: dict[fx.Node, tuple[str, ...]] = {}
    for gradient in graph.gradients():
        if gradient.node.meta["val"].numel() != 0:
            found[gradient.node] = (*found.get(gradient.node, ()), gradient.parameter)
    return found


def _moves(graph: TrainingGraph) -> list[tuple[fx.Node, fx.Node]]:
    """Comparisons that do not stand there yet, each with the first launch that carries its gradient."""
    carriers: dict[str, fx.Node] = {}
    for node in graph.walk():
        if is_launch(node) and "provenance" in node.meta:
            for parameter in node.meta["provenance"].parameters:
                carriers.setdefault(parameter, node)
    order = graph.positions()
    found = []
    for node in graph.walk():
        if DELIVERED in node.meta:
            parameters = node.meta["provenance"].parameters
            launches = [carriers[name] for name in parameters if name in carriers]
            last = max(launches, key=order.__getitem__, default=None)
            if last is not None and node not in _behind(last):
                found.append((node, last))
    return found


def _sum_at_once(graph: TrainingGraph, comparison: fx.Node) -> None:
    """Let the sum of a gradient's bits stand in front of the bucket that came behind the gradient."""
    total: Any = comparison.args[1]
    words: list[fx.Node] = [total]
    while words[-1].meta.get("provenance") == total.meta["provenance"]:
        words += words[-1].all_input_nodes
    made = words.pop()
    for node in words:
        made.append(node)


def _behind(launch: fx.Node) -> list[fx.Node]:
    """The comparisons right behind a launch."""
    found, node = [], launch.next
    while DELIVERED in node.meta:
        found.append(node)
        node = node.next
    return found
