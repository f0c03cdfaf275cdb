"""Buckets on their way over the ranks: what passes that reduce gradients share.

A bucket is launched right behind the node that fills it, and finished where its parts are read: behind the last
computation, or at once. One that is sent as it is goes through an all-reduce, or, in a fixed order, through two
legs:

    bucket ─▶ all_to_all ─ … ─▶ wait ─▶ this rank's shard, summed in the order of the ranks
           ─▶ all_gather ─ … ─▶ wait
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from fxpasses.config import FIXED
from fxpasses.graph import TrainingGraph, ancestors
from fxpasses.precision import DTYPES
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class FilledBucket:
    """A bucket that was filled, and not reduced yet.

    Attributes:
        flat: the node that fills it; `meta["bucket"]` says with what.
        readers: nodes that lead to gradient outputs, in order. What else reads it wants this rank's value.
        made_by: name of the pass that reduces it.
    """

    flat: fx.Node
    readers: tuple[fx.Node, ...]
    made_by: str

    @property
    def index(self) -> int:
        return self.flat.meta["bucket"].index

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.flat.meta["bucket"].parameters

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.flat.meta["bucket"].shapes

    @property
    def numels(self) -> tuple[int, ...]:
        return self.flat.meta["bucket"].numels

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.meta["val"].dtype

    def write(
        self, graph: TrainingGraph, before: fx.Node, rule: str, fn: Callable[..., Any], *args: Any
    ) -> Any:
        """`splice` with this bucket's name and provenance."""
        bucket = self.flat.meta["bucket"]
        origin = Provenance(
            self.made_by, rule, self.flat.name, bucket.model_line, bucket.parameters
        )
        return splice(graph, before, fn, *args, name=f"bucket{bucket.index}", provenance=origin)

    def mark_launch(self, launch: fx.Node) -> None:
        """Say that this collective is what reduces the bucket."""
        launch.meta["reduces"] = True
        payload = launch.args[0]
        assert isinstance(payload, fx.Node)
        payload.meta["bucket"] = self.flat.meta["bucket"]

    def deliver(self, graph: TrainingGraph, result: fx.Node) -> None:
        """Let the readers read the reduced bucket."""
        result.meta["reduced_bucket"] = self.flat.meta["bucket"]
        for reader in self.readers:
            reader.replace_input_with(self.flat, result)
        if not self.flat.users:
            graph.graph.erase_node(self.flat)


def filled_buckets(graph: TrainingGraph, made_by: str) -> list[FilledBucket]:
    """All that bucketing has left, in order."""
    order = graph.positions()
    flats = [node for node in graph.walk() if "bucket" in node.meta]
    outward = ancestors(g.node for g in graph.gradients())
    return [
        FilledBucket(
            flat, tuple(sorted(outward & flat.users.keys(), key=order.__getitem__)), made_by
        )
        for flat in flats
    ]


def payload_bytes(launches: Iterable[fx.Node]) -> int:
    values = [launch.all_input_nodes[0].meta["val"] for launch in launches]
    return sum(value.numel() * value.element_size() for value in values)


@dataclasses.dataclass(frozen=True)
class Dense:
    """How buckets are sent as they are.

    Attributes:
        reduce: `"mean"` or `"sum"`. The mean divides before the sum, in the wider of the two dtypes.
        dtype: on the wire, as option `reduce_dtype` says it; None is the bucket's own.
        order: `"any"`, as the all-reduce adds up, or `"fixed"`, by rank: then an element's sum depends
            neither on the bucket that it is in nor on its place there.
        group: registered name of the process group.
        world: its size.
    """

    reduce: str
    dtype: str | None
    order: str
    group: str
    world: int

    @property
    def legs(self) -> int:
        """Two ranks' sum has one order."""
        return 2 if self.order == FIXED and self.world > 2 else 1

    def launch(self, graph: TrainingGraph, bucket: FilledBucket) -> fx.Node:
        """The first collective, from the bucket's parts: scaled behind the concatenation it would be written
        twice.

        Raises:
            ValueError: for a complex bucket in another dtype.
        """
        if bucket.dtype.is_complex and self.dtype is not None:
            raise ValueError(
                f"reduce_dtype={self.dtype!r} does not fit the complex gradient of {bucket.parameters[0]!r}; "
                "leave reduce_dtype out"
            )

        def launch(parts: list[torch.Tensor]) -> torch.Tensor:
            whole = torch.cat([self._share(part, bucket.dtype) for part in parts])
            if self.legs == 1:
                return torch.ops._c10d_functional.all_reduce(whole, "sum", self.group)
            shard = -(-whole.numel() // self.world)
            whole = torch.nn.functional.pad(whole, (0, shard * self.world - whole.numel()))
            sizes = [shard] * self.world
            return torch.ops._c10d_functional.all_to_all_single(whole, sizes, sizes, self.group)

        # A bucket of one gradient may have been decomposed to a copy.
        is_cat = bucket.flat.target is torch.ops.aten.cat.default
        parts = bucket.flat.args[0] if is_cat else [bucket.flat]
        node: fx.Node = bucket.write(graph, bucket.flat.next, "launch", launch, parts)
        if self.legs == 1:
            bucket.mark_launch(node)
        return node

    def relaunch(
        self, graph: TrainingGraph, bucket: FilledBucket, launch: fx.Node, before: fx.Node
    ) -> fx.Node:
        """The second of two collectives."""
        wide, wire = self._dtypes(bucket.dtype)

        def relaunch(pieces: torch.Tensor) -> torch.Tensor:
            rows = torch.ops._c10d_functional.wait_tensor(pieces).view(self.world, -1).to(wide)
            total = functools.reduce(torch.add, rows.unbind())
            return torch.ops._c10d_functional.all_gather_into_tensor(
                total.to(wire), self.world, self.group
            )

        node: fx.Node = bucket.write(graph, before, "relaunch", relaunch, launch)
        bucket.mark_launch(node)
        return node

    def finish(
        self, graph: TrainingGraph, bucket: FilledBucket, launch: fx.Node, before: fx.Node
    ) -> fx.Node:
        """The reduced bucket."""
        numel = sum(bucket.numels)

        def finish(arrived: torch.Tensor) -> torch.Tensor:
            arrived = torch.ops._c10d_functional.wait_tensor(arrived)
            return (arrived if self.legs == 1 else arrived[:numel]).to(bucket.dtype)

        node: fx.Node = bucket.write(graph, before, "finish", finish, launch)
        return node

    def _share(self, part: torch.Tensor, own: torch.dtype) -> torch.Tensor:
        """What this rank adds to the sum."""
        wide, wire = self._dtypes(own)
        if self.reduce == "mean" and self.world > 1:
            part = part.to(wide) / self.world
        return part.to(wire)

    def _dtypes(self, own: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """The wider of both, and that on the wire."""
        wire = DTYPES[self.dtype] if self.dtype else own
        return torch.promote_types(own, wire), wire


def places_of_second_legs(launches: list[fx.Node], end: fx.Node) -> list[fx.Node]:
    """Where second legs stand: behind the next bucket's first one, the last in front of `end`."""
    return [*(launch.next for launch in launches[1:]), end]
