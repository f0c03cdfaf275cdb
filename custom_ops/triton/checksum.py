"""`custom_ops.checksum` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.layout import CHECKSUM_WORD

_WORD = tl.constexpr(CHECKSUM_WORD)
_TILE = 4096


def seal(words: torch.Tensor) -> torch.Tensor:
    """Copies and adds up in one pass: what is added up is subtracted, in memory, from -1."""
    sealed = torch.empty_like(words)
    sealed[..., CHECKSUM_WORD] = -1
    _sum(words, sealed, sealed.view(-1)[CHECKSUM_WORD:], words.shape[-1], copy=True)
    return sealed


def checksums(words: torch.Tensor) -> torch.Tensor:
    out = words.new_full(words.shape[:-1], -1)
    _sum(words, None, out.view(-1), 1, copy=False)
    return out


def _sum(
    words: torch.Tensor, copies: torch.Tensor | None, sums: torch.Tensor, stride: int, copy: bool
) -> None:
    pieces, size = words.shape[:-1].numel(), words.shape[-1]
    _subtract[(triton.cdiv(size, _TILE) * pieces,)](words, copies, sums, size, stride, copy, _TILE)


@triton.jit
def _subtract(
    words, copies, sums, size, stride, COPY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Not autotuned: sums are changed in place."""
    tiles = tl.cdiv(size, TILE)
    piece = (tl.program_id(0) // tiles).to(tl.int64)
    word = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = (word < size) & (word != _WORD)
    x = tl.load(words + piece * size + word, mask=exists, other=0)
    if COPY:
        tl.store(copies + piece * size + word, x, mask=exists)
    tl.atomic_add(sums + piece * stride, -tl.sum(x.to(tl.int64)).to(tl.int32))
