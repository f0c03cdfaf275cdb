"""Gradients that are no products but sums, added up again.

    before   x ─▶ sum ─▶ gradient        after   x ─┬▶ sum ─┬▶ gradient
                                                    └▶ sum in fp64 ─┴▶ agree? ─▶ alarm (state)

Before: a backward. After: the same results, and a state that counts the gradients of biases, norms and
embeddings which are further from a second sum than roundings go (`guards/sums.py`). A gradient that is made by
neither such a sum nor a checked product (by an elementwise operator, or two of those added) is counted as
`unchecked`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxpasses.graph import TrainingGraph
from fxpasses.guards.alarms import place_of, write_alarms
from fxpasses.guards.products import checkable
from fxpasses.guards.sums import Check, check_of, makers
from fxpasses.passes.base import Pass, Report
from fxpasses.rewrite import Provenance, model_line, splice


@dataclasses.dataclass(frozen=True)
class CheckSums(Pass):
    """No options."""

    name: ClassVar[str] = "check_sums"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True
    idempotent: ClassVar[bool] = False  # what is wrong would count twice

    def has_work(self, graph: TrainingGraph) -> bool:
        return any(check_of(node) for node in makers(graph))

    def run(self, graph: TrainingGraph) -> Report:
        made = makers(graph)
        checks = {node: check for node in made if (check := check_of(node)) is not None}
        if not checks:
            return Report(changed=False)
        wrong = [
            (self._check(graph, node, check, made[node]), place_of(node, "sum"))
            for node, check in checks.items()
        ]
        write_alarms(graph, self.name, wrong)
        products = set(checkable(graph, set(made)))
        return Report(
            True, {"checked": len(checks), "unchecked": len(made.keys() - checks - products)}
        )

    def _check(
        self, graph: TrainingGraph, node: fx.Node, check: Check, parameters: tuple[str, ...]
    ) -> fx.Node:
        fn, arguments = check
        origin = Provenance(self.name, "checksum", node.name, model_line(node), parameters)
        return splice(
            graph,
            graph.behind(node),
            fn,
            *arguments,
            name=f"check_{node.name}",
            provenance=origin,
        )
