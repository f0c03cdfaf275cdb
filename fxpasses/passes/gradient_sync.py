"""Reduce each bucket over the ranks with one all-reduce, as nodes of the graph.

    before   cat ─▶ views            after   div W, cat ─▶ all_reduce ── … ──▶ wait ─▶ views

Before: buckets. After: each gradient output passed exactly one reducing collective. A launch stands right
behind its bucket, in bucket order on every rank. With `overlap` all waits stand behind the last
computation, in the order of the launches; without it each wait follows its launch (for comparison: both
give bitwise the same gradients).

The mean divides before the sum, as DDP does: the scaling fuses into the copy that fills the bucket. With a
wire dtype other than the gradient's, that division is done in the wider of the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import fx

from fxpasses.config import REDUCTIONS, WIRE_DTYPES, nearest
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class GradientSync(Pass):
    """Options: `reduce` (`mean` or `sum`), `dtype` on the wire (`fp32`, `bf16`, `fp16`; None: the gradient's
    own), `overlap`. Environment: `group` (registered name of the process group), `world` (its size).
    """

    reduce: str | None = from_environment("reduce")
    dtype: str | None = from_environment("reduce_dtype")
    overlap: bool = True
    group: str | None = from_environment("group")
    world: int | None = from_environment("world")

    name: ClassVar[str] = "gradient_sync"
    stage: ClassVar[str] = "backward"
    requires: ClassVar[frozenset[str]] = frozenset({"buckets"})
    provides: ClassVar[frozenset[str]] = frozenset({"reduced"})
    preserves_numerics: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for option, choices in (("reduce", REDUCTIONS), ("dtype", WIRE_DTYPES)):
            value = getattr(self, option)
            if value is not None and value not in choices:
                raise ValueError(
                    f"option 'passes': gradient_sync{{{option}={value}}}{nearest(value, choices)}"
                )

    def error_bound(self) -> str:
        return (
            "|out - exact| <= (W + 1) * eps(wire dtype) * sum over ranks |g / W| (mean) or |g| (sum) "
            "+ eps(gradient dtype) * |out|, while no partial sum leaves the normal range of the wire dtype"
        )

    def run(self, graph: TrainingGraph) -> Report:
        order = graph.positions()
        flats = [node for node in graph.walk() if "bucket" in node.meta]
        outward = _ancestors(g.node for g in graph.gradients())
        readers = [sorted(outward & flat.users.keys(), key=order.__getitem__) for flat in flats]
        launches = [self._launch(graph, flat) for flat in flats]
        for flat, launch, reading in zip(flats, launches, readers, strict=True):
            self._finish(graph, flat, launch, reading)
        wire_bytes = sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in launches)
        return Report(bool(flats), {"all_reduces": len(flats), "bytes": wire_bytes})

    def _launch(self, graph: TrainingGraph, flat: fx.Node) -> fx.Node:
        group, world = self.group, self.world
        assert group is not None and world is not None and self.reduce is not None
        own = flat.meta["val"].dtype
        if own.is_complex and self.dtype is not None:
            raise ValueError(
                f"reduce_dtype={self.dtype!r} does not fit the complex gradient of "
                f"{flat.meta['bucket'].parameters[0]!r}; leave reduce_dtype out"
            )
        wire = TORCH_DTYPES[self.dtype] if self.dtype else own

        def payload(x: torch.Tensor) -> torch.Tensor:
            if self.reduce == "mean" and world > 1:
                x = x.to(torch.promote_types(own, wire)) / world
            return x.to(wire)

        def launch(parts: list[torch.Tensor]) -> torch.Tensor:
            whole = torch.cat([payload(part) for part in parts])
            return torch.ops._c10d_functional.all_reduce(whole, "sum", group)

        # From the bucket's parts: scaled behind the concatenation, it would be written twice. A bucket of
        # one gradient may have been decomposed to a copy.
        is_cat = flat.target is torch.ops.aten.cat.default
        node = splice(
            graph,
            flat.next,
            launch,
            flat.args[0] if is_cat else [flat],
            name=f"bucket{flat.meta['bucket'].index}",
            provenance=self._origin(flat, "launch"),
        )
        node.meta["reduces"] = True
        node.args[0].meta["bucket"] = flat.meta["bucket"]
        return node

    def _finish(
        self, graph: TrainingGraph, flat: fx.Node, launch: fx.Node, readers: list[fx.Node]
    ) -> None:
        result = splice(
            graph,
            readers[0] if self.overlap else launch.next,
            lambda x: torch.ops._c10d_functional.wait_tensor(x).to(flat.meta["val"].dtype),
            launch,
            name=f"bucket{flat.meta['bucket'].index}",
            provenance=self._origin(flat, "finish"),
        )
        result.meta["reduced_bucket"] = flat.meta["bucket"]
        for reader in readers:
            reader.replace_input_with(flat, result)
        if not flat.users:
            graph.graph.erase_node(flat)

    def _origin(self, flat: fx.Node, rule: str) -> Provenance:
        bucket = flat.meta["bucket"]
        return Provenance(self.name, rule, flat.name, bucket.model_line, bucket.parameters)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from. What else reads a bucket wants its local value."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
