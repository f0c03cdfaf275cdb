"""Reduce each bucket over the ranks as it is, with one all-reduce, or in a fixed order with two collectives.

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
from typing import ClassVar

import torch

from fxpasses.config import ANY, ORDERS, REDUCTIONS, WIRE_DTYPES, nearest
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.precision import DTYPES
from fxpasses.reduction import Dense, filled_buckets, payload_bytes, places_of_second_legs


@dataclasses.dataclass(frozen=True)
class GradientSync(Pass):
    """Options: `reduce` (`mean` or `sum`), `dtype` on the wire (`fp32`, `bf16`, `fp16`; None: the gradient's
    own), `order` of the sum (`any`, `fixed`), `overlap`. Environment: `group` (registered name of the process
    group), `world` (its size).
    """

    reduce: str | None = from_environment("reduce")
    dtype: str | None = from_environment("reduce_dtype")
    order: str | None = from_environment("reduce_order")
    overlap: bool = True
    group: str | None = from_environment("group")
    world: int | None = from_environment("world")

    name: ClassVar[str] = "gradient_sync"
    stage: ClassVar[str] = "backward"
    requires: ClassVar[frozenset[str]] = frozenset({"buckets"})
    provides: ClassVar[frozenset[str]] = frozenset({"reduced"})
    preserves_numerics: ClassVar[bool] = False
    idempotent: ClassVar[bool] = False  # it would find its payloads, which are buckets

    def __post_init__(self) -> None:
        known = {"reduce": REDUCTIONS, "dtype": WIRE_DTYPES, "order": ORDERS}
        for option, choices in known.items():
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

    def tolerance(self, local: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ranks = local.shape[0]
        wire = torch.finfo(DTYPES[self.dtype] if self.dtype else local.dtype)
        parts = local.abs().double() / (ranks if self.reduce == "mean" else 1)
        bound = (ranks + 1) * wire.eps * parts.sum(0)
        bound += torch.finfo(local.dtype).eps * out.abs().double()
        tiny = max(wire.tiny, torch.finfo(local.dtype).tiny)
        normal = (parts.sum(0) <= wire.max) & ((parts == 0) | (parts >= tiny)).all(0)
        return torch.where(normal, bound, torch.inf)

    def has_work(self, graph: TrainingGraph) -> bool:
        return any("bucket" in node.meta for node in graph.walk())

    def run(self, graph: TrainingGraph) -> Report:
        assert self.group is not None and self.world is not None and self.reduce is not None
        dense = Dense(self.reduce, self.dtype, self.order or ANY, self.group, self.world)
        buckets = filled_buckets(graph, self.name)
        if not buckets:
            return Report(False, {"collectives": 0, "bytes": 0})
        launches = payloads = [dense.launch(graph, bucket) for bucket in buckets]
        if dense.legs == 2:
            order = graph.positions()
            end = min((bucket.readers[0] for bucket in buckets), key=order.__getitem__)
            places = places_of_second_legs(launches, end)
            if not self.overlap:
                places = [launch.next for launch in launches]
            launches = [
                dense.relaunch(graph, *each) for each in zip(buckets, launches, places, strict=True)
            ]
            payloads = payloads + launches
        for bucket, launch in zip(buckets, launches, strict=True):
            place = bucket.readers[0] if self.overlap else launch.next
            bucket.deliver(graph, dense.finish(graph, bucket, launch, place))
        return Report(
            True,
            {"collectives": len(payloads), "bytes": payload_bytes(payloads)},
        )
