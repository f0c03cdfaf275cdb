"""Agree over the ranks which gradients took part, where the backward alone can't tell.

A compiled backward makes a zero for each output that the loss did not use, so a parameter behind such an
output gets a zero gradient where eager autograd gives `None` (and weight decay then moves it). The runtime
knows which tangents were given; over several ranks a gradient is `None` only if that holds on all of them.

Before: a graph whose gradients depend on different tangents. After: one more state input, a float per
gradient, summed over the ranks by the first collective of the graph. It is not one per set of tangents, since a
gradient can also take part by what micro-batches left of it. A graph whose gradients all depend on the same
tangents is left alone, since its backward runs only if those exist.

Where the ranks' graphs differ (`layout`), it is a float per parameter of the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graph import StateSpec, TrainingGraph, tangents_reaching
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice

STATE_KIND = "participation"


@dataclasses.dataclass(frozen=True)
class Participation(Pass):
    """Environment: `group`, the registered name of the process group; `layout`, parameters in the order that
    the ranks agreed on, where their graphs differ.
    """

    group: str | None = from_environment("group")
    layout: tuple[str, ...] | None = from_environment("layout")

    name: ClassVar[str] = "participation"
    stage: ClassVar[str] = "backward"
    provides: ClassVar[frozenset[str]] = frozenset({"participation"})

    def has_work(self, graph: TrainingGraph) -> bool:
        return self.layout is not None or len(tangent_sets(graph, tangents_reaching(graph))) > 1

    def run(self, graph: TrainingGraph) -> Report:
        if any("bucket" in node.meta for node in graph.walk()):
            raise ValueError(
                "option 'passes': 'participation' looks at what each gradient depends on, which buckets mix; "
                "put it in front of 'bucketing'"
            )
        reach = tangents_reaching(graph)
        if self.layout is None and len(tangent_sets(graph, reach)) < 2:
            return Report(changed=False)
        flags = len(flagged_outputs(graph, reach) if self.layout is None else self.layout)
        device = next(n for _, n, _ in graph.outputs() if n is not None).meta["val"].device
        spec = StateSpec(STATE_KIND, "", (flags,), torch.float32, device)
        launch = splice(
            graph,
            graph.first_call,
            lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", self.group),
            graph.add_state(spec),
            name="participation",
            provenance=Provenance(self.name, "launch"),
        )
        total = splice(
            graph,
            graph.output_node,
            torch.ops._c10d_functional.wait_tensor,
            launch,
            name="participation",
            provenance=Provenance(self.name, "finish"),
        )
        graph.write_state(spec.name, total)
        return Report(changed=True, counts={"flags": flags})


def flagged_outputs(
    graph: TrainingGraph, reach: Mapping[fx.Node, frozenset[int]]
) -> dict[int, frozenset[int]]:
    """Gradients, of parameters and of inputs, that depend on tangents: position among the outputs, in order
    → the tangents.

    Args:
        reach: `tangents_reaching(graph)`.
    """
    return {
        index: reach[node]
        for index, node, role in graph.outputs()
        if role.kind in ("gradient", "input_gradient") and node is not None and reach[node]
    }


def tangent_sets(
    graph: TrainingGraph, reach: Mapping[fx.Node, frozenset[int]]
) -> set[frozenset[int]]:
    """The different sets of tangents that gradients depend on."""
    return set(flagged_outputs(graph, reach).values())
