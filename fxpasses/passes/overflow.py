"""Notice gradients that are not finite, once they are reduced, so that all ranks notice the same.

    before   reduced bucket ─▶ views          after   reduced bucket ─┬▶ views
                                                                      └▶ all finite? ─▶ overflow (state)

Before: a backward whose gradients are what the optimizer will see. After: a state output that stays not 0 once
any gradient of the step was not finite. No bucket waits for another's check, and nothing is read by the host:
sums over ranks carry NaN and infinity themselves. It stands last.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from fxpasses.finite import is_finite, is_inexact
from fxpasses.graph import OVERFLOW_STATE, StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report
from fxpasses.precision import CLEAR, class_of
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class Overflow(Pass):
    """No options. Only synchronising backwards are checked: a local gradient is no one else's business yet."""

    name: ClassVar[str] = "overflow"
    stage: ClassVar[str] = "backward"

    def has_work(self, graph: TrainingGraph) -> bool:
        return any(_may_overflow(gradient.node) for gradient in graph.gradients())

    def run(self, graph: TrainingGraph) -> Report:
        checked = dict.fromkeys(_whole(g.node) for g in graph.gradients() if _may_overflow(g.node))
        nodes = list(checked)
        if not nodes:
            return Report(changed=False)
        spec = StateSpec(OVERFLOW_STATE, "", (), torch.float32, nodes[0].meta["val"].device)
        flag = splice(
            graph,
            graph.output_node,
            lambda old, xs: torch.stack([old, *((~is_finite(x)).any().float() for x in xs)]).amax(),
            graph.add_state(spec),
            nodes,
            name="overflow",
            provenance=Provenance(self.name, "check"),
        )
        graph.write_state(spec.name, flag)
        return Report(True, {"checked": len(nodes)})


def _may_overflow(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.numel()) and is_inexact(value)


def _whole(node: fx.Node) -> fx.Node:
    """The reduced bucket that a gradient is a part of: one check for all of its gradients. Else itself."""
    source = node
    while "reduced_bucket" not in source.meta:
        if len(source.all_input_nodes) != 1 or class_of(source) != CLEAR:
            return node
        (source,) = source.all_input_nodes
    return source
