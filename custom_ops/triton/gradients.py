"""`custom_ops.gradients` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.triton.common import INFINITY, MAGNITUDE, OPTIONS, bits_of, raised

_TILE = 4096


def unscale(
    flat: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sum of squares a program, so that their order is always the same."""
    unscaled = torch.empty_like(flat, dtype=torch.float32)
    programs = triton.cdiv(flat.numel(), _TILE)
    sums = flat.new_zeros(programs, dtype=torch.float64)
    bad = flat.new_zeros((), dtype=torch.int32)
    if programs:
        _unscale[(programs,)](
            flat, factor, unscaled, sums, bad, flat.numel(), _TILE, num_warps=8, **OPTIONS
        )
    return unscaled, bad.float(), sums.sum().sqrt().float()


@triton.jit
def _unscale(flat, factor, unscaled, sums, bad, numel, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * TILE + tl.arange(0, TILE)
    values = tl.load(flat + at, mask=at < numel, other=0.0).to(tl.float32) * tl.load(factor)
    values = tl.where(at < numel, values, 0.0)  # 0 times infinity is not 0
    tl.store(unscaled + at, values, mask=at < numel)
    wide = values.to(tl.float64)
    tl.store(sums + program, tl.sum(wide * wide))
    raised(bad, ((bits_of(values) & MAGNITUDE) >= INFINITY).to(tl.int32))
