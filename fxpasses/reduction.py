"""Buckets on their way over the ranks: what passes that reduce gradients share.

A bucket is launched right behind the node that fills it, and finished where its parts are read: behind the last
computation, or at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

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

    def launch_all_reduce(
        self, graph: TrainingGraph, reduce: str, dtype: str | None, group: str, world: int
    ) -> fx.Node:
        """Send it as it is. The mean divides before the sum, in the wider of the two dtypes; from the bucket's
        parts, since scaled behind the concatenation it would be written twice.

        Args:
            dtype: on the wire, as option `reduce_dtype` says it; None is the bucket's own.

        Raises:
            ValueError: for a complex bucket in another dtype.
        """
        if self.dtype.is_complex and dtype is not None:
            raise ValueError(
                f"reduce_dtype={dtype!r} does not fit the complex gradient of {self.parameters[0]!r}; leave "
                "reduce_dtype out"
            )
        own = self.dtype
        wire = DTYPES[dtype] if dtype else own

        def payload(x: torch.Tensor) -> torch.Tensor:
            if reduce == "mean" and world > 1:
                x = x.to(torch.promote_types(own, wire)) / world
            return x.to(wire)

        def launch(parts: list[torch.Tensor]) -> torch.Tensor:
            whole = torch.cat([payload(part) for part in parts])
            return torch.ops._c10d_functional.all_reduce(whole, "sum", group)

        # A bucket of one gradient may have been decomposed to a copy.
        is_cat = self.flat.target is torch.ops.aten.cat.default
        parts = self.flat.args[0] if is_cat else [self.flat]
        node: fx.Node = self.write(graph, self.flat.next, "launch", launch, parts)
        self.mark_launch(node)
        return node

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
