"""Reduce buckets in compressed form, what was lost kept for the next step.

    one leg    bucket + residual ─▶ encode ─▶ all_gather ─ … ─▶ wait ─▶ decode the mean ─▶ views
    two legs   bucket + residual ─▶ encode ─▶ all_to_all ─ … ─▶ wait ─▶ mean of this rank's shard, encoded
                                                      ─▶ all_gather ─ … ─▶ wait ─▶ decode ─▶ views

Two legs from three ranks on, where the scheme can be cut into shards: each rank then receives 2 (W-1)/W
payloads instead of W-1. Before: buckets of one scheme each. After: each gradient output passed one reducing
exchange; what has no scheme is all-reduced as it is. A launch stands right behind its bucket, the second leg's
behind the next bucket's first, all other waits behind the last computation: the same order on every rank, and
every rank decodes the same bytes.

Error feedback (Seide et al., Interspeech 2014): a residual per parameter, a state. What the owner of a shard
loses in the second leg goes into its own residual, W-fold since means divide by W; so there is one residual, in
no rank's way when the number of ranks changes: the sum of what was sent and of all residuals is the sum of all
gradients. New residuals are written only if everything that this graph has reduced is finite; else the old ones
stay.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from fxpasses.compression import NONE, Rules, parse_rules, scheme_of
from fxpasses.exchange import Exchange, exchange_of
from fxpasses.graph import StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.reduction import FilledBucket, filled_buckets, payload_bytes
from fxpasses.rewrite import Provenance, splice

RESIDUAL = "residual"


@dataclasses.dataclass
class _Sent:
    """A bucket on its way.

    Attributes:
        exchange: None for one that is all-reduced as it is.
        launch: the collective that is in flight.
        old, new: the residual, before and after the first leg; None without one.
        lost: by this rank as the owner of a shard.
        result: the reduced bucket.
    """

    bucket: FilledBucket
    exchange: Exchange | None
    launch: fx.Node
    old: fx.Node | None = None
    new: fx.Node | None = None
    lost: fx.Node | None = None
    result: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class Compress(Pass):
    """Options: `scheme`, which one for which parameter (see `fxpasses.compression`); `reduce`; `dtype` of what
    has no scheme, on the wire. Environment: `group` (registered name of the process group), `world`, `rank`.
    """

    scheme: str | None = from_environment("compression")
    reduce: str | None = from_environment("reduce")
    dtype: str | None = from_environment("reduce_dtype")
    group: str | None = from_environment("group")
    world: int | None = from_environment("world")
    rank: int | None = from_environment("rank")

    name: ClassVar[str] = "compress"
    stage: ClassVar[str] = "backward"
    requires: ClassVar[frozenset[str]] = frozenset({"buckets"})
    provides: ClassVar[frozenset[str]] = frozenset({"reduced", "compressed"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"gradient_sync"})
    preserves_numerics: ClassVar[bool] = False

    def __post_init__(self) -> None:
        parse_rules(self.scheme or "")

    def error_bound(self) -> str:
        return (
            "by bucket, what its scheme states (see custom_ops): int8 and int4, each leg: s/2 (1 + 2^-14) with "
            "s the bf16 scale of its group; fp16: max(2^-11 |v|, 2^-39 max |v|); bf16: 2^-8 |v|; topk: every "
            "element that is not among its chunk's largest. With feedback: sent + residuals = gradients, up to "
            "rounding in fp32"
        )

    def run(self, graph: TrainingGraph) -> Report:
        rules = parse_rules(self.scheme or "")
        sent = [self._first_leg(graph, b, rules) for b in filled_buckets(graph, self.name)]
        if not sent:
            return Report(changed=False)
        order = graph.positions()
        end = min((one.bucket.readers[0] for one in sent), key=order.__getitem__)
        payloads = [one.launch for one in sent]
        behind = [one.launch.next for one in sent[1:]]
        for one, before in zip(sent, [*behind, end], strict=True):
            if one.exchange is not None and one.exchange.legs == 2:
                self._second_leg(graph, one, before)
                payloads.append(one.launch)
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

    def _first_leg(self, graph: TrainingGraph, bucket: FilledBucket, rules: Rules) -> _Sent:
        assert self.group is not None and self.world is not None and self.rank is not None
        assert self.reduce is not None
        scheme = scheme_of(bucket.parameters, rules)
        if scheme.scheme == NONE:
            launch = bucket.launch_all_reduce(
                graph, self.reduce, self.dtype, self.group, self.world
            )
            return _Sent(bucket, None, launch)
        if not bucket.dtype.is_floating_point:
            raise ValueError(
                f"option 'compression': {scheme.scheme!r} does not fit the {bucket.dtype} gradient of "
                f"{bucket.parameters[0]!r}; give it 'none'"
            )
        exchange = exchange_of(scheme, bucket.numels, self.group, self.world, self.rank)
        old = None
        if scheme.has_residual:
            value = bucket.flat.meta["val"]
            parts = tuple(zip(bucket.parameters, bucket.numels, strict=True))
            spec = StateSpec(
                RESIDUAL, parts[0][0], (value.numel(),), torch.float32, value.device, parts=parts
            )
            old = graph.add_state(spec)
        place = bucket.flat.next
        payload, new = bucket.write(
            graph, place, "encode", lambda x, r: exchange.encode(x.float(), r), bucket.flat, old
        )
        launch = bucket.write(graph, place, "launch", exchange.launch, payload)
        if exchange.legs == 1:
            bucket.mark_launch(launch)
        return _Sent(bucket, exchange, launch, old, new)

    def _second_leg(self, graph: TrainingGraph, one: _Sent, before: fx.Node) -> None:
        assert one.exchange is not None
        exchange = one.exchange
        pieces = one.bucket.write(
            graph, before, "receive", torch.ops._c10d_functional.wait_tensor, one.launch
        )
        piece, one.lost = one.bucket.write(
            graph, before, "recode", lambda x: exchange.recode(x, one.old is not None), pieces
        )
        one.launch = one.bucket.write(graph, before, "relaunch", exchange.relaunch, piece)
        one.bucket.mark_launch(one.launch)

    def _finish(self, graph: TrainingGraph, one: _Sent) -> None:
        place, dtype, exchange = one.bucket.readers[0], one.bucket.dtype, one.exchange
        assert self.world is not None
        scale = self.world if self.reduce == "sum" else 1
        arrived = one.bucket.write(
            graph, place, "wait", torch.ops._c10d_functional.wait_tensor, one.launch
        )

        def decode(x: torch.Tensor) -> torch.Tensor:
            if exchange is None:
                return x.to(dtype)
            mean = exchange.decode(x)
            return (mean * scale if scale != 1 else mean).to(dtype)

        one.result = one.bucket.write(graph, place, "decode", decode, arrived)
        assert one.result is not None
        one.bucket.deliver(graph, one.result)

    def _commit(self, graph: TrainingGraph, sent: list[_Sent]) -> None:
        with_residual = [one for one in sent if one.new is not None]
        if not with_residual:
            return
        # A compressed bucket is finite or all NaN (a shard of it, with two legs), so few elements tell.
        results = [(one.result, one.exchange) for one in sent]
        finite = splice(
            graph,
            graph.output_node,
            lambda xs: torch.stack(
                [
                    (x if exchange is None else exchange.telling(x)).isfinite().all()
                    for x, (_, exchange) in zip(xs, results, strict=True)
                ]
            ).all(),
            [result for result, _ in results],
            name="finite",
            provenance=Provenance(self.name, "finite"),
        )
        for one in with_residual:
            exchange = one.exchange
            assert exchange is not None and one.old is not None

            def commit(finite, old, new, lost, exchange=exchange):
                return torch.where(finite, exchange.residual(new, lost), old)

            written = one.bucket.write(
                graph, graph.output_node, "commit", commit, finite, one.old, one.new, one.lost
            )
            graph.write_state(one.old.meta["state"].name, written)
