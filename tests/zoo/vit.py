"""Vision transformer: patches, a class token, learned positions, pre-norm blocks.

Exercises: a strided convolution that is frozen (a random patch projection steadies training), parameters used
as values (class token, positions), fused attention, dropout with p = 0.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

CLASSES = 5


class Block(nn.Module):
    """Attention and MLP, each behind a norm, with dropout in front of the residual addition."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def attend(self, x_btw: torch.Tensor) -> torch.Tensor:
        """Self-attention over all patches."""
        split = self.qkv(x_btw).unflatten(-1, (3, self.heads, -1))
        q_bhtd, k_bhtd, v_bhtd = split.permute(2, 0, 3, 1, 4).unbind(0)
        y_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd)
        return self.out(y_bhtd.transpose(1, 2).flatten(-2))

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        x_btw = x_btw + self.dropout(self.attend(self.norm1(x_btw)))
        return x_btw + self.dropout(self.mlp(self.norm2(x_btw)))


class ViT(nn.Module):
    """Images of 8 x 8 pixels, as four patches."""

    def __init__(self, width: int = 24, heads: int = 2, layers: int = 1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.patches.requires_grad_(False)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width, heads, 0.1) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        patches_btw = self.patches(x_bchw).flatten(2).transpose(1, 2)
        first_btw = self.class_token.expand(len(x_bchw), -1, -1)
        x_btw = torch.cat([first_btw, patches_btw], 1) + self.positions
        return self.head(self.norm(self.blocks(self.dropout(x_btw))[:, 0]))


def batch(seed: int) -> Batch:
    generator = seeded_generator(seed)
    images = torch.randn(8, 3, 8, 8, generator=generator)
    labels = torch.randint(CLASSES, (8,), generator=generator)
    return Batch((images,), (labels,))


ENTRY = Entry("vit", ViT, batch, F.cross_entropy)
