"""`custom_ops.checksum` in C++."""

from __future__ import annotations

import torch

from custom_ops import native
from custom_ops.layout import CHECKSUM_WORD


def seal(words: torch.Tensor) -> torch.Tensor:
    sealed = words.clone()
    sealed[..., CHECKSUM_WORD] = checksums(sealed)
    return sealed


def checksums(words: torch.Tensor) -> torch.Tensor:
    out = words.new_empty(words.shape[:-1])
    native.call("checksums", words, out.numel(), words.shape[-1], out)
    return out
