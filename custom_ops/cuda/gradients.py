"""`custom_ops.gradients` in CUDA C++."""

from __future__ import annotations

import torch

from custom_ops.cuda.driver import THREADS, flat_kind, launch, processors

_BLOCKS_PER_PROCESSOR = 8


def unscale(
    flat: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    unscaled = torch.empty_like(flat, dtype=torch.float32)
    most = _BLOCKS_PER_PROCESSOR * processors(flat.device)
    blocks = min(-(-flat.numel() // (4 * THREADS)), most)
    sums = flat.new_zeros(blocks, dtype=torch.float64)
    bad = flat.new_zeros((), dtype=torch.int32)
    launch(
        "gradients.unscale",
        (blocks, 1),
        *(flat, factor, unscaled, sums, bad, flat.numel()),
        constants={"THREADS": THREADS, **flat_kind(flat)},
    )
    return unscaled, bad.float(), sums.sum().sqrt().float()
