"""CLIP: an image tower and a text tower, compared with each other over the batch.

Exercises: a 0-dim parameter (the temperature), two independent towers that meet late, normalised vectors, a
masked mean, a loss over all pairs of a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

VOCAB, LENGTH = 40, 6


class Text(nn.Module):
    """The mean over the real tokens, projected."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, tokens_bt: torch.Tensor, real_bt: torch.Tensor) -> torch.Tensor:
        weights_bt1 = real_bt.unsqueeze(-1).float()
        total_bw = (self.mlp(self.tokens(tokens_bt)) * weights_bt1).sum(1)
        return total_bw / weights_bt1.sum(1)


class CLIP(nn.Module):
    """Images and texts in, similarities of all pairs out."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(9 * width, width)
        )
        self.text = Text(width)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(
        self, images_bchw: torch.Tensor, tokens_bt: torch.Tensor, real_bt: torch.Tensor
    ) -> torch.Tensor:
        image_bw = F.normalize(self.image(images_bchw), dim=-1)
        text_bw = F.normalize(self.text(tokens_bt, real_bt), dim=-1)
        return self.log_scale.exp() * image_bw @ text_bw.T


def batch(seed: int) -> Batch:
    generator = seeded_generator(seed)
    images = torch.randn(8, 3, 8, 8, generator=generator)
    tokens = torch.randint(VOCAB, (8, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (8,), generator=generator)
    return Batch((images, tokens, torch.arange(LENGTH) < lengths[:, None]), (torch.arange(8),))


def loss(similarity_bb: torch.Tensor, own_b: torch.Tensor) -> torch.Tensor:
    """Each image finds its text, and each text its image."""
    return (F.cross_entropy(similarity_bb, own_b) + F.cross_entropy(similarity_bb.T, own_b)) / 2


ENTRY = Entry("clip", CLIP, batch, loss)
