"""MobileNet (v2): inverted residuals around depthwise convolutions, the stem frozen as in fine-tuning.

Exercises: depthwise convolution, batch norm whose weights are frozen while its running statistics go on,
frozen parameters in front of trained ones, a clamped activation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

CLASSES = 5


def conv_norm(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list:
    """A convolution that keeps the size at stride 1, and its norm."""
    padding = kernel // 2
    conv = nn.Conv2d(before, after, kernel, stride, padding, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(after)]


class InvertedResidual(nn.Module):
    """Widen, filter each channel by itself, narrow without activation; a shortcut where shapes agree."""

    def __init__(self, before: int, after: int, stride: int, expansion: int = 3) -> None:
        super().__init__()
        wide = before * expansion
        self.residual = stride == 1 and before == after
        self.layers = nn.Sequential(
            *conv_norm(before, wide, 1),
            nn.ReLU6(),
            *conv_norm(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            *conv_norm(wide, after, 1),
        )

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        y_bchw = self.layers(x_bchw)
        return x_bchw + y_bchw if self.residual else y_bchw


class MobileNet(nn.Module):
    """Frozen stem, two inverted residuals, head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_norm(3, width, 3, stride=2), nn.ReLU6())
        self.stem.requires_grad_(False)
        self.blocks = nn.Sequential(
            InvertedResidual(width, width, stride=1), InvertedResidual(width, 2 * width, stride=2)
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x_bchw)).mean((2, 3)))


def batch(seed: int) -> Batch:
    generator = seeded_generator(seed)
    images = torch.randn(8, 3, 12, 12, generator=generator)
    labels = torch.randint(CLASSES, (8,), generator=generator)
    return Batch((images,), (labels,))


ENTRY = Entry("mobilenet", MobileNet, batch, F.cross_entropy)
