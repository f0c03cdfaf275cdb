"""A limit for the elements of each rank's own gradients.

    before   gradient ─▶ …            after   gradient ─┬▶ …
                                                        └▶ |g| <= limit? ─▶ alarm (state)

Before: a backward whose gradients are this rank's own. After: the same, and a state that counts the gradients
with an element above the limit, or one that is not finite. It stands before gradients are bucketed: sums over
ranks hide whose it was.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from fxpasses.finite import is_finite, is_inexact
from fxpasses.graph import TrainingGraph
from fxpasses.guards.alarms import write_alarms
from fxpasses.guards.option import parse_guards
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class CheckValues(Pass):
    """Environment: `guards`, whose `values` is the limit."""

    guards: str | None = from_environment("guards")

    name: ClassVar[str] = "check_values"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True
    idempotent: ClassVar[bool] = False  # what is wrong would count twice

    def has_work(self, graph: TrainingGraph) -> bool:
        return parse_guards(self.guards or "").values > 0 and bool(_checked(graph))

    def run(self, graph: TrainingGraph) -> Report:
        limit = parse_guards(self.guards or "").values
        gradients = _checked(graph) if limit else {}
        if not gradients:
            return Report(changed=False)
        wrong = []
        for node, parameters in gradients.items():
            flag = splice(
                graph,
                graph.behind(node),
                lambda g: ~((g.abs() <= limit) & is_finite(g)).all(),
                node,
                name=f"check_{node.name}",
                provenance=Provenance(self.name, "limit", node.name, parameters=parameters),
            )
            wrong.append((flag, f"gradient of {parameters[0]}"))
        write_alarms(graph, self.name, wrong)
        return Report(True, {"checked": len(wrong)})


def _checked(graph: TrainingGraph) -> dict[torch.fx.Node, tuple[str, ...]]:
    gradients = graph.parameters_by_gradient()
    return {g: names for g, names in gradients.items() if is_inexact(g.meta["val"])}
