"""What a bucket goes through between its gradients and their mean, from the point of view of a pass.

    states ─┬─▶ encode ─▶ launch ─ … ─▶ wait ─▶ [recode ─▶ relaunch ─ … ─▶ wait ─▶] decode ─▶ the mean
            └───────────────────────────────────────────────────────────────────▶ news ─▶ states

`kept` is what a later function needs of an earlier one: a mapping of tensors. All functions are tensor code for
`splice`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpasses.codecs import Codec, codec_of
from fxpasses.compression import NONE, POWERSGD, Scheme
from fxpasses.feedback import Without, feedback_of
from fxpasses.graph import StateSpec
from fxpasses.powersgd import PowerSGD

ROUNDS = "rounds"  # state: how often a bucket was encoded with random rounding
Kept = dict[str, Any]
Parameters = tuple[tuple[str, tuple[int, ...]], ...]


class Exchange(Protocol):
    """The way of one bucket.

    Attributes:
        legs: 1, or 2 with `recode` and `relaunch`.
        first_leg_reduces: whether gradients in the first payload are not sent again in the second.
    """

    @property
    def legs(self) -> int: ...

    @property
    def first_leg_reduces(self) -> bool: ...

    def states(self, device: torch.device) -> tuple[StateSpec, ...]:
        """What lives across steps; the functions get it as `olds`, in this order."""

    def encode(self, flat: Tensor, olds: Sequence[Tensor]) -> tuple[Tensor, Kept]:
        """[n] fp32 → payload."""

    def launch(self, payload: Tensor) -> Tensor:
        """The collective of the first leg."""

    def recode(self, arrived: Tensor, olds: Sequence[Tensor], kept: Kept) -> tuple[Tensor, Kept]:
        """What the first leg brought → payload of the second."""

    def relaunch(self, payload: Tensor) -> Tensor:
        """The collective of the second leg."""

    def decode(self, arrived: Tensor, olds: Sequence[Tensor], kept: Kept) -> tuple[Tensor, Kept]:
        """What the last leg brought → the mean over the ranks, [n] fp32."""

    def bases(self, kept: Kept) -> Sequence[Any]:
        """Tensors that say how gradients are encoded, and hold none."""

    def telling(self, mean: Tensor) -> Tensor:
        """Elements of the mean that are not all finite if any of it is not."""

    def news(
        self, flat: Tensor, olds: Sequence[Tensor], kept: Kept, result: Tensor
    ) -> tuple[Tensor, ...]:
        """The new states, from what was encoded and what `decode` made."""


@dataclasses.dataclass(frozen=True)
class Coded:
    """A codec, and what is done about its error.

    Attributes:
        parameters: with the shapes of their gradients, in the bucket's order.
        stochastic: whether rounding is random.
        index: of the bucket, so that no two round alike.
    """

    codec: Codec
    feedback: Without
    parameters: Parameters
    stochastic: bool
    index: int

    @property
    def legs(self) -> int:
        return self.codec.legs

    @property
    def first_leg_reduces(self) -> bool:
        return self.legs == 1

    def states(self, device: torch.device) -> tuple[StateSpec, ...]:
        parts = tuple((name, math.prod(shape)) for name, shape in self.parameters)
        first, numel = parts[0][0], sum(n for _, n in parts)
        flats = [
            StateSpec(kind, first, (numel,), torch.float32, device, parts=parts)
            for kind in self.feedback.kinds
        ]
        rounds = [StateSpec(ROUNDS, first, (), torch.int64, device)] if self.stochastic else []
        return (*flats, *rounds)

    def encode(self, flat: Tensor, olds: Sequence[Tensor]) -> tuple[Tensor, Kept]:
        payload, lost = self.codec.encode(*self.feedback.before(flat, olds), self._seed(olds, 0))
        return payload, {"lost": lost, "lost_as_owner": None}

    def launch(self, payload: Tensor) -> Tensor:
        return self.codec.launch(payload)

    def recode(self, arrived: Tensor, olds: Sequence[Tensor], kept: Kept) -> tuple[Tensor, Kept]:
        has_feedback = kept["lost"] is not None
        piece, lost = self.codec.recode(arrived, has_feedback, self._seed(olds, 1))
        return piece, {**kept, "lost_as_owner": lost}

    def relaunch(self, payload: Tensor) -> Tensor:
        return self.codec.relaunch(payload)

    def decode(self, arrived: Tensor, olds: Sequence[Tensor], kept: Kept) -> tuple[Tensor, Kept]:
        return self.feedback.result(self.codec.decode(arrived), olds), kept

    def bases(self, kept: Kept) -> Sequence[Any]:
        return ()

    def telling(self, mean: Tensor) -> Tensor:
        return mean[:1]  # a rank's flag covers all of its bucket

    def news(
        self, flat: Tensor, olds: Sequence[Tensor], kept: Kept, result: Tensor
    ) -> tuple[Tensor, ...]:
        lost = kept["lost"]
        if lost is not None:
            lost = self.codec.residual(lost, kept["lost_as_owner"])
        news = self.feedback.news(flat, olds, lost, result)
        return (*news, olds[-1] + 1) if self.stochastic else news

    def _seed(self, olds: Sequence[Tensor], leg: int) -> Tensor | None:
        if not self.stochastic:
            return None
        return (olds[-1] * self.codec.world + self.codec.rank) * 2**20 + (2 * self.index + leg)


def exchange_of(
    scheme: Scheme, parameters: Parameters, group: str, world: int, rank: int, index: int
) -> Exchange | None:
    """The exchange of a bucket; None for one that is sent as it is.

    Args:
        parameters: with the shapes of their gradients, in the bucket's order.
        index: of the bucket.
    """
    if scheme.scheme == NONE:
        return None
    if scheme.scheme == POWERSGD:
        found = PowerSGD(parameters, scheme.rank, bool(scheme.feedback), group, world)
        return found if any(found.is_low_rank(shape) for _, shape in parameters) else None
    codec = codec_of(scheme, [math.prod(shape) for _, shape in parameters], group, world, rank)
    return Coded(codec, feedback_of(scheme), parameters, scheme.stochastic, index)
