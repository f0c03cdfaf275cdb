"""Reduce buckets in compressed form, what was lost kept for the next step.

    one leg    bucket + residual ─▶ encode ─▶ all_gather ─ … ─▶ wait ─▶ decode the mean ─▶ views
    two legs   bucket + residual ─▶ encode ─▶ all_to_all ─ … ─▶ wait ─▶ mean of this rank's shard, encoded
                                                      ─▶ all_gather ─ … ─▶ wait ─▶ decode ─▶ views

Two legs from three ranks on, where the scheme can be cut into shards: each rank then receives 2 (W-1)/W
payloads instead of W-1. PowerSGD has two legs of its own (`powersgd.py`). Before: buckets of one scheme each.
After: each gradient output passed one reducing exchange; what has no scheme is all-reduced as it is. A launch
stands right behind its bucket, the second leg's behind the next bucket's first, all other waits behind the last
computation (without `overlap`, for comparison, each stands right behind its launch): the same order on every
rank, and every rank decodes the same bytes.

Error feedback (Seide et al., Interspeech 2014): a residual per parameter, a state. What the owner of a shard
loses in the second leg goes into its own residual, W-fold since means divide by W; so there is one residual, in
no rank's way when the number of ranks changes: the sum of what was sent and of all residuals is the sum of all
gradients. New residuals are written only if everything that this graph has reduced is finite; else the old ones
stay.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpasses.codecs import loss_bound
from fxpasses.compression import Rules, parse_rules, scheme_of
from fxpasses.config import ANY
from fxpasses.exchange import Exchange, exchange_of
from fxpasses.finite import is_finite
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.reduction import (
    Dense,
    FilledBucket,
    filled_buckets,
    payload_bytes,
    places_of_second_legs,
)
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass
class _Sent:
    """A bucket on its way.

    Attributes:
        exchange: None for one that is all-reduced as it is.
        launch: the collective that is in flight.
        encoded: the bucket in fp32; None without an exchange.
        olds: the states before this step.
        kept: what later functions of the exchange need.
        result: the mean, in fp32; of a bucket without an exchange, what was reduced.
    """

    bucket: FilledBucket
    exchange: Exchange | None
    launch: fx.Node
    encoded: fx.Node | None = None
    olds: list[fx.Node] = dataclasses.field(default_factory=list)
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)
    result: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class Compress(Pass):
    """Options: `scheme`, which one for which parameter (see `fxpasses.compression`); `reduce`; `dtype` of what
    has no scheme, on the wire, and `order` of its sum; `overlap`. Environment: `group` (registered name of the
    process group), `world`, `rank`; `levels` of adaptive schemes.
    """

    scheme: str | None = from_environment("compression")
    reduce: str | None = from_environment("reduce")
    dtype: str | None = from_environment("reduce_dtype")
    order: str | None = from_environment("reduce_order")
    overlap: bool = True
    group: str | None = from_environment("group")
    world: int | None = from_environment("world")
    rank: int | None = from_environment("rank")
    levels: tuple[tuple[str, str], ...] | None = from_environment("levels")

    name: ClassVar[str] = "compress"
    stage: ClassVar[str] = "backward"
    requires: ClassVar[frozenset[str]] = frozenset({"buckets"})
    provides: ClassVar[frozenset[str]] = frozenset({"reduced", "compressed"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"gradient_sync"})
    preserves_numerics: ClassVar[bool] = False
    idempotent: ClassVar[bool] = False  # it would find its payloads, which are buckets

    def __post_init__(self) -> None:
        parse_rules(self.scheme or "")

    def error_bound(self) -> str:
        return (
            "by bucket, what its scheme states (see custom_ops): int8 and int4, each leg: s/2 (1 + 2^-14) with "
            "s the bf16 scale of its group; fp16: max(2^-11 |v|, 2^-39 max |v|); bf16: 2^-8 |v|; topk: every "
            "element that is not among its chunk's largest; powersgd: what is outside of the subspace. With "
            "feedback: sent + residuals = gradients, up to rounding in fp32"
        )

    def tolerance(self, local: Tensor, out: Tensor) -> Tensor:
        """Of one gradient, whatever shares its bucket; NaN where anything in that is not finite."""
        ranks, eps = local.shape[0], torch.finfo(out.dtype).eps
        size = local.abs().double()
        rules = parse_rules(self.scheme or "")
        bounds = [loss_bound(scheme, size) for scheme in {scheme for _, scheme in rules}]
        bound = functools.reduce(torch.maximum, bounds, torch.zeros(()).double())
        # What is sent as it is, and rounding: of the sum, of the mean and of what is delivered.
        bound = bound + (ranks + 4) * max(eps, torch.finfo(torch.float32).eps) * size.mean(0)
        bound = bound * (ranks if self.reduce == "sum" else 1) + eps * out.abs().double()
        return torch.where(out.isnan() | (self.dtype is not None), torch.inf, bound)

    def has_work(self, graph: TrainingGraph) -> bool:
        return any("bucket" in node.meta for node in graph.walk())

    def run(self, graph: TrainingGraph) -> Report:
        rules = parse_rules(self.scheme or "")
        sent = [self._first_leg(graph, b, rules) for b in filled_buckets(graph, self.name)]
        if not sent:
            return Report(changed=False)
        order = graph.positions()
        end = min((one.bucket.readers[0] for one in sent), key=order.__getitem__)
        payloads = [one.launch for one in sent]
        places = [launch.next for launch in payloads]
        if self.overlap:
            places = places_of_second_legs(payloads, end)
        for one, before in zip(sent, places, strict=True):
            if (one.exchange or self._dense).legs == 2:
                self._second_leg(graph, one, before)
                payloads = [*payloads, one.launch]
        for one in sent:
            self._finish(graph, one)
        self._commit(graph, sent)
        compressed = sum(one.exchange is not None for one in sent)
        return Report(
            True,
            {
                "buckets": len(sent),
                "compressed": compressed,
                "collectives": len(payloads),
                "bytes": payload_bytes(payloads),
            },
        )

    @property
    def _dense(self) -> Dense:
        assert self.group is not None and self.world is not None and self.reduce is not None
        return Dense(self.reduce, self.dtype, self.order or ANY, self.group, self.world)

    def _first_leg(self, graph: TrainingGraph, bucket: FilledBucket, rules: Rules) -> _Sent:
        assert self.group is not None and self.world is not None and self.rank is not None
        assert self.reduce is not None
        scheme = scheme_of(bucket.parameters[0], rules, self.levels)
        parameters = tuple(zip(bucket.parameters, bucket.shapes, strict=True))
        exchange = exchange_of(scheme, parameters, self.group, self.world, self.rank, bucket.index)
        if exchange is None:
            return _Sent(bucket, None, self._dense.launch(graph, bucket))
        if not bucket.dtype.is_floating_point:
            raise ValueError(
                f"option 'compression': {scheme.scheme!r} does not fit the {bucket.dtype} gradient of "
                f"{bucket.parameters[0]!r}; give it 'none'"
            )
        device = bucket.flat.meta["val"].device
        olds = [graph.add_state(spec) for spec in exchange.states(device)]
        place = bucket.flat.next

        def encode(x, olds):
            x = x.float()
            return x, exchange.encode(x, olds)

        encoded, (payload, kept) = bucket.write(graph, place, "encode", encode, bucket.flat, olds)
        launch = bucket.write(graph, place, "launch", exchange.launch, payload)
        if exchange.first_leg_reduces:
            bucket.mark_launch(launch)
        return _Sent(bucket, exchange, launch, encoded, olds, kept)

    def _second_leg(self, graph: TrainingGraph, one: _Sent, before: fx.Node) -> None:
        exchange = one.exchange
        if exchange is None:
            one.launch = self._dense.relaunch(graph, one.bucket, one.launch, before)
            return
        arrived = one.bucket.write(
            graph, before, "receive", torch.ops._c10d_functional.wait_tensor, one.launch
        )
        payload, one.kept = one.bucket.write(
            graph, before, "recode", exchange.recode, arrived, one.olds, one.kept
        )
        for node in exchange.bases(one.kept):
            node.meta["encoding"] = True
        one.launch = one.bucket.write(graph, before, "relaunch", exchange.relaunch, payload)
        one.bucket.mark_launch(one.launch)

    def _finish(self, graph: TrainingGraph, one: _Sent) -> None:
        dtype, exchange = one.bucket.dtype, one.exchange
        place = one.bucket.readers[0] if self.overlap else one.launch.next
        if exchange is None:
            one.result = self._dense.finish(graph, one.bucket, one.launch, place)
            one.bucket.deliver(graph, one.result)
            return
        assert self.world is not None
        scale = self.world if self.reduce == "sum" else 1
        arrived = one.bucket.write(
            graph, place, "wait", torch.ops._c10d_functional.wait_tensor, one.launch
        )

        def decode(x, olds, kept):
            mean, kept = exchange.decode(x, olds, kept)
            return mean, kept, (mean * scale if scale != 1 else mean).to(dtype)

        one.result, one.kept, delivered = one.bucket.write(
            graph, place, "decode", decode, arrived, one.olds, one.kept
        )
        one.bucket.deliver(graph, delivered)

    def _commit(self, graph: TrainingGraph, sent: list[_Sent]) -> None:
        with_state = [one for one in sent if one.olds]
        if not with_state:
            return
        exchanges = [one.exchange for one in sent]
        finite = splice(
            graph,
            graph.output_node,
            lambda results: torch.stack(
                [
                    is_finite(x if exchange is None else exchange.telling(x)).all()
                    for x, exchange in zip(results, exchanges, strict=True)
                ]
            ).all(),
            [one.result for one in sent],
            name="finite",
            provenance=Provenance(self.name, "finite"),
        )
        for one in with_state:
            assert one.exchange is not None

            def commit(finite, encoded, olds, kept, result, exchange=one.exchange):
                news = exchange.news(encoded, olds, kept, result)
                return [torch.where(finite, *pair) for pair in zip(news, olds, strict=True)]

            written = one.bucket.write(
                *(graph, graph.output_node, "commit", commit, finite),
                *(one.encoded, one.olds, one.kept, one.result),
            )
            for old, new in zip(one.olds, written, strict=True):
                graph.write_state(old.meta["state"].name, new)
