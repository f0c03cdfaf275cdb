"""A plain convolutional network for images of 32 by 32: the benchmarks' other model."""

from __future__ import annotations

import itertools

import torch
from torch import nn

WIDTHS = (64, 128, 256, 512, 512)
CLASSES = 1000


class CNN(nn.Module):
    """3x3 convolutions, two to a width, each width at half the resolution of the last; 10 M parameters."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, classes: int = CLASSES) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1), nn.ReLU()]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(after, after, 3, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images_bchw: torch.Tensor) -> torch.Tensor:
        """Returns logits (b, classes)."""
        return self.head(self.features(images_bchw).mean((2, 3)))
