"""Room for what operators return."""

from __future__ import annotations

import torch


def payload_and_residual(
    size: int, residual: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[size] uint8, and room for a new residual: as large as the old one, or empty without one."""
    lost = (
        like.new_empty(0, dtype=torch.float32) if residual is None else torch.empty_like(residual)
    )
    return like.new_empty(size, dtype=torch.uint8), lost
