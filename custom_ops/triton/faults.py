"""`custom_ops.faults` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.faults import INTEGERS, NEWS
from custom_ops.triton.common import tuned


def strike(x: torch.Tensor, row: torch.Tensor, site: int) -> tuple[torch.Tensor, torch.Tensor]:
    struck, news = torch.empty_like(x), row.new_zeros(NEWS)
    numel = x.numel()
    if numel:
        integer = INTEGERS[x.dtype.itemsize]
        _strike[lambda meta: (triton.cdiv(numel, meta["TILE"]),)](
            *(x.view(-1).view(integer), struck.view(-1).view(integer)),
            *(row, torch.remainder(row[1], numel), news, site, numel),
        )
    return struck, news


@tuned()
@triton.jit(do_not_specialize=["site"])
def _strike(x, struck, row, index, news, site, numel, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = tl.load(x + at, mask=at < numel, other=0)
    hit = at == tl.where(tl.load(row) == site, tl.load(index), -1)
    after = (bits & tl.load(row + 2).to(bits.dtype)) ^ tl.load(row + 3).to(bits.dtype)
    after = tl.where(hit, after, bits)
    tl.store(struck + at, after, mask=at < numel)
    tl.store(news + at * 0, 1, mask=hit)
    tl.store(news + 1 + at * 0, at, mask=hit)
    tl.store(news + 2 + at * 0, bits.to(tl.int64), mask=hit)
    tl.store(news + 3 + at * 0, after.to(tl.int64), mask=hit)
