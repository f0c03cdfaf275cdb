"""What is done about the error of a codec, so that over the steps nothing is lost.

    Without     nothing
    Residual    what was not sent is added to the next gradient
    Corrected   the same of gradients with momentum (top-k)
    Estimates   both ends keep an estimate of the gradient, or of its moving average; what is sent is the
                difference to it

All functions are tensor code for `splice`; states are flat fp32 tensors of a bucket, [n].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fxpasses.compression import ESTIMATES, Scheme

RESIDUAL, VELOCITY, ESTIMATE, MEAN_ESTIMATE = "residual", "velocity", "estimate", "mean_estimate"


@dataclasses.dataclass(frozen=True)
class Without:
    """What is lost stays lost. The other kinds are subclasses."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its states, in the order in which the functions take and return them."""
        return ()

    def before(self, flat: Tensor, olds: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """What to encode, and the residual to add to it."""
        return flat, None

    def result(self, mean: Tensor, olds: Sequence[Tensor]) -> Tensor:
        """The mean gradient, from the mean of what was sent."""
        return mean

    def news(
        self, flat: Tensor, olds: Sequence[Tensor], lost: Tensor | None, result: Tensor
    ) -> tuple[Tensor, ...]:
        """The new states.

        Args:
            lost: what `before` returned, added up, minus what was sent of it.
        """
        return ()


@dataclasses.dataclass(frozen=True)
class Residual(Without):
    """Seide et al., Interspeech 2014, "1-bit stochastic gradient descent"."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return (RESIDUAL,)

    def before(self, flat: Tensor, olds: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        return flat, olds[0]

    def news(
        self, flat: Tensor, olds: Sequence[Tensor], lost: Tensor | None, result: Tensor
    ) -> tuple[Tensor, ...]:
        assert lost is not None
        return (lost,)


@dataclasses.dataclass(frozen=True)
class Corrected(Without):
    """Momentum is taken before elements are chosen, and forgotten where one was sent: otherwise the optimizer's
    momentum would treat what arrives late as if it were new. The optimizer has none of its own then.

    Lin et al., ICLR 2018, "Deep gradient compression", sections 3.1 and 3.2.

    Attributes:
        momentum: what is kept of the velocity, in (0, 1).
    """

    momentum: float

    @property
    def kinds(self) -> tuple[str, ...]:
        return (RESIDUAL, VELOCITY)

    def before(self, flat: Tensor, olds: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self._velocity(flat, olds), olds[0]

    def news(
        self, flat: Tensor, olds: Sequence[Tensor], lost: Tensor | None, result: Tensor
    ) -> tuple[Tensor, ...]:
        assert lost is not None
        velocity = self._velocity(flat, olds)
        # An element that was not sent is left as it was.
        return lost, torch.where(lost == velocity + olds[0], velocity, 0.0)

    def _velocity(self, flat: Tensor, olds: Sequence[Tensor]) -> Tensor:
        return self.momentum * olds[1] + flat


@dataclasses.dataclass(frozen=True)
class Estimates(Without):
    """EF21: Richtárik et al., NeurIPS 2021, "EF21: a new, simpler, theoretically better, and practically faster
    error feedback". The mean of the ranks' estimates is the mean estimate, up to rounding.

    Attributes:
        momentum: of the moving average that is estimated instead of the gradient, against its noise; or 0.
            Fatkhullin et al., NeurIPS 2023, "Momentum provably improves error feedback!".
    """

    momentum: float = 0.0

    @property
    def kinds(self) -> tuple[str, ...]:
        return (ESTIMATE, MEAN_ESTIMATE, *((VELOCITY,) if self.momentum else ()))

    def before(self, flat: Tensor, olds: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self._average(flat, olds) - olds[0], torch.zeros_like(flat)

    def result(self, mean: Tensor, olds: Sequence[Tensor]) -> Tensor:
        return olds[1] + mean

    def news(
        self, flat: Tensor, olds: Sequence[Tensor], lost: Tensor | None, result: Tensor
    ) -> tuple[Tensor, ...]:
        assert lost is not None
        average = self._average(flat, olds)
        return average - lost, result, *((average,) if self.momentum else ())

    def _average(self, flat: Tensor, olds: Sequence[Tensor]) -> Tensor:
        if not self.momentum:
            return flat
        return self.momentum * olds[2] + (1 - self.momentum) * flat


def feedback_of(scheme: Scheme) -> Without:
    """What a scheme asks for."""
    if not scheme.has_residual:
        return Without()
    if scheme.feedback == ESTIMATES:
        return Estimates(scheme.momentum)
    return Corrected(scheme.momentum) if scheme.momentum else Residual()
