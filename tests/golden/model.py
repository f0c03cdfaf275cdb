"""The program whose graphs the blessed diffs are about. Its lines stand in them."""

from __future__ import annotations

import torch
from torch import nn


class TwoHeads(nn.Module):
    """A normalised layer and two outputs: every pass finds something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.left, self.right = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.layer(x)).relu()
        return self.left(y), self.right(y)
