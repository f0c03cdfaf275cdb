"""Temporal convolutional network: dilated causal 1-d convolutions with weight norm.

Exercises: 1-d convolution, dilation, parameters behind a parametrization (a weight that is computed from two
parameters at each use), padding on one side, dropout of whole channels with p = 0.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.entry import Batch, Entry, seeded_generator

CHANNELS, LENGTH, KERNEL = 3, 16, 3


class CausalBlock(nn.Module):
    """Two convolutions that see the past only, beside a shortcut."""

    def __init__(self, before: int, after: int, dilation: int) -> None:
        super().__init__()
        self.past = (KERNEL - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(before, after, KERNEL, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(after, after, KERNEL, dilation=dilation))
        self.dropout = nn.Dropout1d(0.1)
        self.shortcut = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x_bct: torch.Tensor) -> torch.Tensor:
        y_bct = x_bct
        for conv in (self.conv1, self.conv2):
            y_bct = self.dropout(F.relu(conv(F.pad(y_bct, (self.past, 0)))))
        return F.relu(y_bct + self.shortcut(x_bct))


class TCN(nn.Module):
    """A series in, its next value at each time out."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.Sequential(CausalBlock(CHANNELS, width, 1), CausalBlock(width, width, 2))
        self.head = nn.Conv1d(width, CHANNELS, 1)

    def forward(self, x_bct: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x_bct))


def batch(seed: int) -> Batch:
    """Random walks."""
    steps = torch.randn(4, CHANNELS, LENGTH + 1, generator=seeded_generator(seed))
    walk = steps.cumsum(-1) / LENGTH**0.5
    return Batch((walk[..., :-1],), (walk[..., 1:],))


ENTRY = Entry("tcn", TCN, batch, F.mse_loss)
