"""The checksum of a piece."""

from __future__ import annotations

import torch

from custom_ops.layout import CHECKSUM_WORD


def seal(words: torch.Tensor) -> torch.Tensor:
    """[1, pieces, words] int32 -> a copy with checksums."""
    sealed = words.clone()
    sealed[..., CHECKSUM_WORD] = checksums(sealed)
    return sealed


def checksums(words: torch.Tensor) -> torch.Tensor:
    """[..., words] int32 -> [...] int32."""
    sums = words.sum(-1, dtype=torch.int64) - words[..., CHECKSUM_WORD]
    return (~sums).to(torch.int32)
