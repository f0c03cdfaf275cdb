"""What each architecture of the zoo offers: a model, batches, and a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Batch(NamedTuple):
    """What the model is called with, and what its outputs are compared with."""

    inputs: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        name: the module's name.
        make: the model, in training mode; its initial values come from the global generator.
        batch: the batch of a seed; always the same shapes, so that a model is compiled once.
        loss: a scalar, from what the model returns and the batch's targets.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[..., torch.Tensor]

    def seeded(self, seed: int = 0) -> nn.Module:
        """The model with the initial values of a seed."""
        torch.manual_seed(seed)
        return self.make()

    def apply(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """The loss of a model, or of what it was compiled to, on a batch."""
        return self.loss(model(*batch.inputs), *batch.targets)


def seeded_generator(seed: int) -> torch.Generator:
    """Batches have a generator of their own: the global one is dropout's."""
    return torch.Generator().manual_seed(seed)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name; one that has several names (tied) once, by the first."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
