"""`custom_ops.checksum` in CUDA C++."""

from __future__ import annotations

import torch

from custom_ops.cuda.driver import THREADS, launch, processors
from custom_ops.layout import CHECKSUM_WORD

_BLOCKS_PER_PROCESSOR = 8


def seal(words: torch.Tensor) -> torch.Tensor:
    """Copies and adds up in one pass: what is added up is subtracted, in memory, from -1."""
    sealed = torch.empty_like(words)
    sealed[..., CHECKSUM_WORD] = -1
    _subtract(words, sealed, sealed.view(-1)[CHECKSUM_WORD:], words.shape[-1])
    return sealed


def checksums(words: torch.Tensor) -> torch.Tensor:
    out = words.new_full(words.shape[:-1], -1)
    _subtract(words, None, out.view(-1), 1)
    return out


def _subtract(
    words: torch.Tensor, copies: torch.Tensor | None, sums: torch.Tensor, stride: int
) -> None:
    pieces, pairs = words.shape[:-1].numel(), words.shape[-1] // 2
    most = _BLOCKS_PER_PROCESSOR * processors(words.device)
    blocks = pieces, min(-(-pairs // THREADS), most)
    launch("checksum.subtract", blocks, words, copies, sums, pairs, stride)
