"""Diffusion: a convolutional denoiser that is told the time step.

Exercises: group norm, a sinusoidal embedding of integers, scale and shift of feature maps from a vector,
nearest-neighbour upsampling, a buffer that is constant and no part of the state dict.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

STEPS = 100


class TimedBlock(nn.Module):
    """Two convolutions beside a shortcut; time scales and shifts the features between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, before)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time, 2 * after)
        self.norm2 = nn.GroupNorm(4, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x_bchw: torch.Tensor, time_bt: torch.Tensor) -> torch.Tensor:
        y_bchw = self.conv1(F.silu(self.norm1(x_bchw)))
        scale, shift = self.time(time_bt)[:, :, None, None].chunk(2, 1)
        y_bchw = self.norm2(y_bchw) * (1 + scale) + shift
        return self.conv2(F.silu(y_bchw)) + self.shortcut(x_bchw)


class Denoiser(nn.Module):
    """Noisy images and time steps in, the noise out."""

    def __init__(self, width: int = 8, time: int = 16) -> None:
        super().__init__()
        rates = torch.exp(-torch.arange(time // 2) * 9.0 / (time // 2))
        self.register_buffer("rates", rates, persistent=False)
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = TimedBlock(width, 2 * width, time)
        self.up = TimedBlock(3 * width, width, time)
        self.last = nn.Sequential(
            nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1)
        )

    def forward(self, x_bchw: torch.Tensor, step_b: torch.Tensor) -> torch.Tensor:
        angles_bt = step_b[:, None] * self.rates
        time_bt = self.time(torch.cat([angles_bt.sin(), angles_bt.cos()], 1))
        first = self.first(x_bchw)
        lower = self.down(F.avg_pool2d(first, 2), time_bt)
        upper = F.interpolate(lower, scale_factor=2.0, mode="nearest")
        return self.last(self.up(torch.cat([first, upper], 1), time_bt))


def batch(seed: int) -> Batch:
    """Noise mixed into flat images, the more the later the step."""
    generator = seeded_generator(seed)
    clean = torch.randn(4, 1, 1, 1, generator=generator).expand(-1, -1, 8, 8)
    noise = torch.randn(4, 1, 8, 8, generator=generator)
    step = torch.randint(STEPS, (4,), generator=generator)
    kept = torch.cos(step / STEPS * torch.pi / 2)[:, None, None, None]
    return Batch((kept * clean + (1 - kept**2).sqrt() * noise, step), (noise,))


ENTRY = Entry("diffusion", Denoiser, batch, F.mse_loss)
