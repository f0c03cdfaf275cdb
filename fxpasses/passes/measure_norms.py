"""Measure the reduced gradients of parameters whose compression adapts to them.

    before   reduced bucket ─▶ views      after   reduced bucket ─┬▶ views
                                                                   └▶ norms ─▶ statistics (a state)

Before: gradients reduced in compressed form; every rank has the same. After: the same, and for each such
parameter a state of three numbers: the norm of its gradient, the moving average of that, and how many there
were. Averages start from zero, so that the first norms count as a change. What is not finite is left out.

It stands behind the compression, whose scheme for the next step is chosen by these numbers (`levels.py`): they
are reduced, so all ranks choose alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, fx

from fxpasses.compression import ADAPTIVE, option_of, parse_rules
from fxpasses.graph import StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice

STATISTICS = "statistics"
FIELDS = 3
DECAY = 0.95


@dataclasses.dataclass(frozen=True)
class MeasureNorms(Pass):
    """Options: `scheme`, as for `compress`. Environment: `levels`, the parameters that have one."""

    scheme: str | None = from_environment("compression")
    levels: tuple[tuple[str, str], ...] | None = from_environment("levels")

    name: ClassVar[str] = "measure_norms"
    stage: ClassVar[str] = "backward"
    requires: ClassVar[frozenset[str]] = frozenset({"compressed"})

    def run(self, graph: TrainingGraph) -> Report:
        rules = parse_rules(self.scheme or "")
        known = None if self.levels is None else {name for name, _ in self.levels}
        measured = 0
        for node in [n for n in graph.walk() if "reduced_bucket" in n.meta]:
            parts = [
                (name, numel)
                for name, numel in zip(
                    node.meta["reduced_bucket"].parameters,
                    node.meta["reduced_bucket"].numels,
                    strict=True,
                )
                if option_of(name, rules).scheme == ADAPTIVE and (known is None or name in known)
            ]
            if parts:
                self._measure(graph, node, [name for name, _ in parts])
            measured += len(parts)
        return Report(bool(measured), {"measured": measured})

    def _measure(self, graph: TrainingGraph, node: fx.Node, names: Sequence[str]) -> None:
        bucket = node.meta["reduced_bucket"]
        chosen = [bucket.parameters.index(name) for name in names]
        spec = StateSpec(
            STATISTICS,
            names[0],
            (FIELDS * len(names),),
            torch.float32,
            node.meta["val"].device,
            parts=tuple((name, FIELDS) for name in names),
        )

        def observe(reduced: Tensor, old: Tensor) -> Tensor:
            parts = reduced.split(bucket.numels)
            # Of fp64 in fp64: torch narrows nothing on the way.
            wide = torch.promote_types(reduced.dtype, torch.float32)
            norms = torch.stack([torch.linalg.vector_norm(parts[at], dtype=wide) for at in chosen])
            norms = norms.float()
            _, average, count = old.view(-1, FIELDS).unbind(1)
            new = torch.stack([norms, DECAY * average + (1 - DECAY) * norms, count + 1], 1)
            return torch.where(norms.isfinite().all(), new.flatten(), old)

        written = splice(
            graph,
            graph.output_node,
            observe,
            node,
            graph.add_state(spec),
            name=f"bucket{bucket.index}_norms",
            provenance=Provenance(self.name, "measure", node.name, bucket.model_line, tuple(names)),
        )
        graph.write_state(spec.name, written)
