"""Where gradients are packed and sent, let the comparison of each stand behind the launch of its bucket.

    before   cat ─▶ launch ─▶ … ─▶ changed?        after   cat ─▶ launch ─▶ changed? ─▶ …

Before: a backward in which comparisons of `check_gradients` stand behind all else. After: the same comparisons,
as soon as they can see what is sent, so that the memory of a gradient is not held for longer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import fx

from fxpasses.effects import is_launch
from fxpasses.graph import DELIVERED, TrainingGraph
from fxpasses.passes.base import Pass, Report


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
    front = graph.behind(made).prev
    for node in words:
        front.append(node)


def _behind(launch: fx.Node) -> list[fx.Node]:
    """The comparisons right behind a launch."""
    found, node = [], launch.next
    while DELIVERED in node.meta:
        found.append(node)
        node = node.next
    return found
