"""Train an architecture in some way, and say where that led."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.zoo.entry import Entry, trained


class Trained(NamedTuple):
    """The loss of each micro-batch, and the state (parameters and buffers) afterwards."""

    losses: torch.Tensor
    state: dict[str, torch.Tensor]


def train(
    entry: Entry,
    wrap: Callable[[nn.Module], Callable[..., Any]],
    steps: int,
    accumulate: int = 1,
    first_seed: int = 0,
    after_backward: Callable[[nn.Module], None] | None = None,
) -> Trained:
    """Train the model of seed 0.

    SGD with momentum: an optimizer that divides a gradient by its own size would make a step of a rounding
    error where a gradient is nearly zero.

    Args:
        wrap: what is called in the model's place, such as `torch.compile`.
        first_seed: that of the first micro-batch, and of what the model draws in it; then they count up.
        after_backward: called with the model before each step.
    """
    model = entry.seeded()
    forward = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for index in range(steps * accumulate):
        batch = entry.batch(first_seed + index)
        torch.manual_seed(first_seed + index)  # dropout draws the same, however the model runs
        loss = entry.apply(forward, batch)
        loss.backward()
        losses.append(loss.detach())
        if (index + 1) % accumulate == 0:
            if after_backward is not None:
                after_backward(model)
            optimizer.step()
            optimizer.zero_grad()
    return Trained(torch.stack(losses), {k: v.clone() for k, v in model.state_dict().items()})


def untrained(entry: Entry) -> set[str]:
    """Names of the state that no optimizer changes: frozen parameters (buffers are not among them)."""
    model = entry.seeded()
    return {name for name, _ in model.named_parameters()} - trained(model).keys()
