"""Gradients as products of two thin matrices: PowerSGD.

    M = gradient + residual [rows, columns]     Q from the step before [columns, rank]
    P = M orth(Q) ─▶ all_reduce ─▶ orth ─▶ Q = Mᵀ P ─▶ all_reduce ─▶ mean of M ≈ P Qᵀ     residual = M - P Qᵀ

Both all-reduces are nodes of the graph, one each for all matrices of a bucket. What has no two dimensions, or
is too small to gain, rides along with the first as it is.

Vogels et al., NeurIPS 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization",
algorithms 1 and 2. Whatever Q a rank begins with, all ranks go on with one P, so that they end with equal bits
also if their Qs differ (after loading states of several steps).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from custom_ops import noise
from fxpasses.feedback import RESIDUAL
from fxpasses.graph import StateSpec

SUBSPACE = "subspace"
_LEAST_GAIN = 2  # a matrix becomes smaller by at least this factor, or goes as it is


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """The exchange of a bucket; see `fxpasses.exchange.Exchange`.

    Attributes:
        parameters: with the shapes of their gradients, as the bucket holds them.
        rank: columns of the thin matrices.
        feedback: whether there is a residual.
        group: registered name of the process group.
        world: its size.
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    rank: int
    feedback: bool
    group: str
    world: int

    @property
    def legs(self) -> int:
        return 2

    @property
    def first_leg_reduces(self) -> bool:
        return True  # what rides along; the thin matrices become bases, which are no gradients

    def is_low_rank(self, shape: tuple[int, ...]) -> bool:
        """Whether a gradient of this shape is sent as thin matrices."""
        if len(shape) < 2:
            return False
        rows, columns = _matrix(shape)
        return (rows + columns) * self.rank * _LEAST_GAIN <= rows * columns

    def states(self, device: torch.device) -> tuple[StateSpec, ...]:
        residual = [(name, math.prod(shape)) for name, shape in self.parameters]
        subspaces = [
            (name, _matrix(shape)[1] * self.rank)
            for name, shape in self.parameters
            if self.is_low_rank(shape)
        ]
        kinds = [(RESIDUAL, residual)] if self.feedback else []
        return tuple(
            StateSpec(
                kind,
                parts[0][0],
                (sum(numel for _, numel in parts),),
                torch.float32,
                device,
                parts=tuple(parts),
            )
            for kind, parts in [*kinds, (SUBSPACE, subspaces)]
        )

    def encode(self, flat: Tensor, olds: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        whole = flat + olds[0] if self.feedback else flat
        matrices, others = self._cut(whole)
        starts = olds[-1].split([m.shape[1] * self.rank for m in matrices])
        thin = [
            matrix @ _orthonormal(_begun(start).view(-1, self.rank))
            for matrix, start in zip(matrices, starts, strict=True)
        ]
        return self._mean([*thin, *others]), {"whole": whole}

    def launch(self, payload: Tensor) -> Tensor:
        return torch.ops._c10d_functional.all_reduce(payload, "sum", self.group)

    def recode(
        self, arrived: Tensor, olds: Sequence[Tensor], kept: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        matrices, others = self._cut(kept["whole"])
        sizes = [m.shape[0] * self.rank for m in matrices]
        *thin, rest = arrived.split([*sizes, arrived.numel() - sum(sizes)])
        bases = [_orthonormal(p.view(-1, self.rank)) for p in thin]
        dense = rest.split([o.numel() for o in others]) if others else ()
        factors = [m.t() @ basis for m, basis in zip(matrices, bases, strict=True)]
        return self._mean(factors), {**kept, "bases": bases, "dense": list(dense)}

    def relaunch(self, payload: Tensor) -> Tensor:
        return self.launch(payload)

    def decode(
        self, arrived: Tensor, olds: Sequence[Tensor], kept: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        bases, dense = iter(kept["bases"]), iter(kept["dense"])
        shapes = [shape for _, shape in self.parameters]
        sizes = [_matrix(shape)[1] * self.rank for shape in shapes if self.is_low_rank(shape)]
        factors = iter(arrived.split(sizes))
        parts = [
            (next(bases) @ next(factors).view(-1, self.rank).t()).flatten()
            if self.is_low_rank(shape)
            else next(dense)
            for shape in shapes
        ]
        return torch.cat(parts), {**kept, "factors": arrived}

    def bases(self, kept: dict[str, Any]) -> list[Any]:
        return kept["bases"]

    def telling(self, mean: Tensor) -> Tensor:
        return mean

    def news(
        self, flat: Tensor, olds: Sequence[Tensor], kept: dict[str, Any], result: Tensor
    ) -> tuple[Tensor, ...]:
        if not self.feedback:
            return (kept["factors"],)
        lengths = [math.prod(shape) for _, shape in self.parameters]
        lost = [
            whole - sent if self.is_low_rank(shape) else torch.zeros_like(sent)
            for whole, sent, (_, shape) in zip(
                kept["whole"].split(lengths), result.split(lengths), self.parameters, strict=True
            )
        ]
        return torch.cat(lost), kept["factors"]

    def _cut(self, whole: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The matrices of a bucket, and the flat rest."""
        parts = whole.split([math.prod(shape) for _, shape in self.parameters])
        matrices, others = [], []
        for part, (_, shape) in zip(parts, self.parameters, strict=True):
            if self.is_low_rank(shape):
                matrices.append(part.view(_matrix(shape)))
            else:
                others.append(part)
        return matrices, others

    def _mean(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's share of the mean of these, in one piece."""
        return torch.cat([part.reshape(-1) for part in parts]) / self.world


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _begun(subspace: Tensor) -> Tensor:
    """Where a matrix has none yet (or had a gradient of zeros), random numbers, the same on every rank."""
    positions = torch.arange(subspace.numel(), device=subspace.device)
    return torch.where(subspace.any(), subspace, noise.uniform(noise.key_of(0), positions) - 0.5)


def _orthonormal(matrix: Tensor) -> Tensor:
    """[n, rank] → the same span, orthonormal; also of a matrix of lower rank."""
    return torch.linalg.qr(matrix).Q
