"""Variational autoencoder: a code is drawn in the forward, and the gradient passes through the draw.

Exercises: random numbers that are no dropout, three outputs that all enter the loss, strided and transposed
convolutions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator


class VAE(nn.Module):
    """Images of 8 x 8 pixels in; their reconstruction's logits, mean and log-variance of the code out."""

    def __init__(self, width: int = 8, code: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.mean, self.log_variance = (nn.Linear(8 * width, code) for _ in range(2))
        self.decoder = nn.Sequential(
            nn.Linear(code, 8 * width),
            nn.ReLU(),
            nn.Unflatten(1, (2 * width, 2, 2)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )

    def forward(self, x_bchw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = self.encoder(x_bchw)
        mean, log_variance = self.mean(features), self.log_variance(features)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def batch(seed: int) -> Batch:
    images = torch.rand(8, 1, 8, 8, generator=seeded_generator(seed)).round()
    return Batch((images,), (images,))


def loss(
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], images: torch.Tensor
) -> torch.Tensor:
    """The evidence lower bound, negative, for each pixel."""
    logits, mean, log_variance = outputs
    divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum()
    return F.binary_cross_entropy_with_logits(logits, images) + divergence / images.numel()


ENTRY = Entry("vae", VAE, batch, loss)
