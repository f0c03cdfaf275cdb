"""U-Net: down, across, up again beside what was there on the way down; a coarse mask as a second output.

Exercises: activations used far from where they are made, concatenation, transposed convolution, max pooling,
batch norm, two outputs (deep supervision).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator


def double_conv(before: int, after: int) -> nn.Sequential:
    """Two convolutions of the same size, each with norm and activation."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """One level; returns mask logits in full and in half resolution."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = double_conv(1, width)
        self.across = double_conv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = double_conv(2 * width, width)
        self.coarse = nn.Conv2d(2 * width, 1, 1)
        self.fine = nn.Conv2d(width, 1, 1)

    def forward(self, x_bchw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top = self.down(x_bchw)
        bottom = self.across(F.max_pool2d(top, 2))
        joined = self.join(torch.cat([top, self.up(bottom)], 1))
        return self.fine(joined), self.coarse(bottom)


def batch(seed: int) -> Batch:
    """Noisy images of a rectangle, which is the mask."""
    generator = seeded_generator(seed)
    mask = torch.zeros(4, 1, 8, 8)
    corners = torch.randint(0, 4, (4, 2), generator=generator).tolist()
    for image, (y, x) in zip(mask, corners, strict=True):
        image[:, y : y + 4, x : x + 4] = 1
    return Batch((mask + torch.randn(mask.shape, generator=generator),), (mask,))


def loss(outputs: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    fine, coarse = outputs
    small = F.avg_pool2d(mask, 2)
    return F.binary_cross_entropy_with_logits(
        fine, mask
    ) + 0.5 * F.binary_cross_entropy_with_logits(coarse, small)


ENTRY = Entry("unet", UNet, batch, loss)
