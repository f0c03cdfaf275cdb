"""Unscaled gradients, whether they are finite, and their norm."""

from __future__ import annotations

import torch


def unscale(
    flat: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`custom_ops.gradients.unscale`."""
    unscaled = flat.float() * factor.reshape(())
    found_inf = (~unscaled.isfinite()).any().float()
    return unscaled, found_inf, unscaled.double().square().sum().sqrt().float()
