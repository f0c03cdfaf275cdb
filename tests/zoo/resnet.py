"""ResNet: basic blocks with batch norm, one of them with a strided projection beside it.

Exercises: 2-d convolution, batch norm with running statistics, residuals.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

CLASSES = 5


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, which is projected where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            projection = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(after))

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        y_bchw = F.relu(self.norm1(self.conv1(x_bchw)))
        return F.relu(self.norm2(self.conv2(y_bchw)) + self.shortcut(x_bchw))


class ResNet(nn.Module):
    """Stem, two stages, head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            BasicBlock(width, width, stride=1), BasicBlock(width, 2 * width, stride=2)
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        y_bchw = self.stages(F.relu(self.norm(self.stem(x_bchw))))
        return self.head(y_bchw.mean((2, 3)))


def batch(seed: int) -> Batch:
    generator = seeded_generator(seed)
    images = torch.randn(8, 3, 8, 8, generator=generator)
    labels = torch.randint(CLASSES, (8,), generator=generator)
    return Batch((images,), (labels,))


ENTRY = Entry("resnet", ResNet, batch, F.cross_entropy)
