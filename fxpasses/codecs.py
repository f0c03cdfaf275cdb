"""What a compressed bucket becomes on the wire, by scheme: encoded, sent in one leg or two, decoded everywhere
alike.

All functions are tensor code for `splice`. Payloads are flat uint8 tensors (see `custom_ops.layout`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import custom_ops.quantise
import custom_ops.topk
import custom_ops.wire16  # noqa: F401  (registers operators, like the two above)
from custom_ops.layout import Layout, Layout16, TopKLayout
from fxpasses.compression import ADAPTIVE, NONE, POWERSGD, Scheme

_TWO_LEGS_FROM = 3  # ranks: with two, both ways carry the same, and one leg rounds once


@dataclasses.dataclass(frozen=True)
class Codec:
    """How one bucket is encoded and decoded.

    Attributes:
        layout: of what this rank encodes.
        group: registered name of the process group.
        world: its size.
        rank: this rank in it; the shard that it owns, with two legs.
    """

    layout: Any
    group: str
    world: int
    rank: int

    @property
    def legs(self) -> int:
        return 1

    @property
    def second_layout(self) -> Any:
        """Of what the owners of shards send, all pieces together."""
        return self.layout

    def encode(
        self, flat: Tensor, residual: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[n] fp32 → payload, and the new residual (None without one).

        Args:
            seed: int64, for stochastic rounding; None rounds to nearest.
        """
        raise NotImplementedError

    def launch(self, payload: Tensor) -> Tensor:
        """The collective of the first leg."""
        if self.legs == 1:
            return torch.ops._c10d_functional.all_gather_into_tensor(
                payload, self.world, self.group
            )
        sizes = [payload.numel() // self.world] * self.world
        return torch.ops._c10d_functional.all_to_all_single(payload, sizes, sizes, self.group)

    def recode(
        self, pieces: Tensor, feedback: bool, seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """All ranks' pieces of this rank's shard → one piece of their mean, and what was lost [shard_numel]."""
        raise NotImplementedError

    def relaunch(self, piece: Tensor) -> Tensor:
        """The collective of the second leg."""
        return torch.ops._c10d_functional.all_gather_into_tensor(piece, self.world, self.group)

    def decode(self, arrived: Tensor) -> Tensor:
        """What the last leg brought → the mean over the ranks, [n] fp32. Not finite anywhere: no element is."""
        raise NotImplementedError

    def residual(self, new: Tensor, lost: Tensor | None) -> Tensor:
        """This rank's residual, with what it lost as an owner."""
        return new


@dataclasses.dataclass(frozen=True)
class _InShards(Codec):
    """One or two legs, by the number of shards."""

    @property
    def legs(self) -> int:
        return 1 if self.layout.shards == 1 else 2

    def rows(self, arrived: Tensor) -> Tensor:
        """With one leg a payload of each rank; with two, one that consists of all owners' pieces."""
        return arrived.view(self.world if self.legs == 1 else 1, -1)


@dataclasses.dataclass(frozen=True)
class Quantised(_InShards):
    """int8 and int4.

    Attributes:
        second_bits: of the second leg.
    """

    second_bits: int

    @property
    def second_layout(self) -> Layout:
        return dataclasses.replace(self.layout, bits=self.second_bits)

    def encode(
        self, flat: Tensor, residual: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        payload, new = torch.ops.fxpasses.quantise(flat, residual, seed, *self.layout.fields)
        return payload, None if residual is None else new

    def recode(
        self, pieces: Tensor, feedback: bool, seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        nothing = (
            pieces.new_zeros(self.layout.shard_numel, dtype=torch.float32) if feedback else None
        )
        piece, lost = torch.ops.fxpasses.requantise(
            pieces.view(self.world, -1),
            nothing,
            seed,
            self.rank,
            self.second_bits,
            *self.layout.fields,
        )
        return piece, lost if feedback else None

    def decode(self, arrived: Tensor) -> Tensor:
        layout = self.second_layout if self.legs == 2 else self.layout
        return torch.ops.fxpasses.dequantise(self.rows(arrived), *layout.fields)

    def residual(self, new: Tensor, lost: Tensor | None) -> Tensor:
        if lost is None:
            return new
        # The same sizes on every rank, also where a shard holds little of the bucket: each rank plans with its
        # own graph, and all have to find one plan.
        front = self.rank * self.layout.shard_numel
        behind = (self.world - 1 - self.rank) * self.layout.shard_numel
        owned = torch.nn.functional.pad(self.world * lost, (front, behind))
        return new + owned[: new.shape[0]]


@dataclasses.dataclass(frozen=True)
class Sixteen(_InShards):
    """fp16 and bf16, with a power-of-two scale. Nothing is kept of what is lost."""

    def encode(
        self, flat: Tensor, residual: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return torch.ops.fxpasses.encode16(flat, *self.layout.fields), None

    def recode(
        self, pieces: Tensor, feedback: bool, seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        shard = Layout16(self.layout.shard_numel, 1, self.layout.dtype)
        mean = torch.ops.fxpasses.decode16(pieces.view(self.world, -1), *shard.fields)
        return torch.ops.fxpasses.encode16(mean, *shard.fields), None

    def decode(self, arrived: Tensor) -> Tensor:
        return torch.ops.fxpasses.decode16(self.rows(arrived), *self.layout.fields)


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """The largest elements. Each rank has others, so that one leg carries them all."""

    def encode(
        self, flat: Tensor, residual: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        old = torch.zeros_like(flat) if residual is None else residual
        payload, new = torch.ops.fxpasses.topk_encode(flat, old, *self.layout.fields)
        return payload, None if residual is None else new

    def decode(self, arrived: Tensor) -> Tensor:
        return torch.ops.fxpasses.topk_decode(arrived.view(self.world, -1), *self.layout.fields)


def codec_of(scheme: Scheme, lengths: Sequence[int], group: str, world: int, rank: int) -> Codec:
    """The codec of a bucket.

    Args:
        lengths: elements of each parameter in the bucket, in order.
    """
    shards = world if world >= _TWO_LEGS_FROM else 1
    numel = sum(lengths)
    if scheme.scheme == "topk":
        return TopK(TopKLayout(numel, scheme.ratio), group, world, rank)
    if scheme.scheme in ("bf16", "fp16"):
        return Sixteen(Layout16(numel, shards, scheme.scheme), group, world, rank)
    layout = Layout(
        tuple(lengths), shards, scheme.bits, scheme.group, scheme.symmetric, scheme.rotate
    )
    second = scheme.second_bits if scheme.scheme == "int4" else scheme.bits
    return Quantised(layout, group, world, rank, second)


def loss_bound(scheme: Scheme, size: Tensor) -> Tensor:
    """How far the mean over the ranks of one gradient may be from what arrives of it, if nothing is fed back.

    Args:
        size: [ranks, *shape] fp64, magnitudes.

    Returns:
        Broadcasts to shape; infinite for fp16, whose bound depends on what else the bucket holds.
    """
    if scheme.scheme == NONE:
        return torch.zeros((), dtype=torch.float64)
    if scheme.scheme == "fp16":
        return torch.full((), torch.inf, dtype=torch.float64)
    if scheme.scheme == "bf16":
        return 2 * 2.0**-8 * size.mean(0) + 2.0**-126  # in each of two legs
    if scheme.scheme == "topk":
        return (1 + 2.0**-8) * size.mean(0)
    if scheme.scheme == POWERSGD:
        return torch.linalg.vector_norm(size.mean(0)).expand(size.shape[1:])
    if scheme.scheme == ADAPTIVE:
        levels = [loss_bound(scheme.level(name), size) for name in scheme.level_names]
        return functools.reduce(torch.maximum, levels)
    if not size.numel():
        return torch.zeros((), dtype=torch.float64)
    largest = size.reshape(size.shape[0], -1).amax(1)
    first = _step(largest, scheme.bits).mean()
    second = scheme.second_bits if scheme.scheme == "int4" else scheme.bits
    total = first
    if size.shape[0] >= _TWO_LEGS_FROM:
        total = first + _step(largest.mean() + 16 * first, second)
    steps = 16.0 if scheme.rotate else 1.0 if scheme.stochastic else 0.5
    return steps * (1 + 2.0**-14) * total


def _step(largest: Tensor, bits: int) -> Tensor:
    """The largest scale that a group may have whose values are no larger than this."""
    return (largest / (2 ** (bits - 1) - 1) * (1 + 2.0**-7 + 2.0**-15)).clamp(min=2.0**-100)
