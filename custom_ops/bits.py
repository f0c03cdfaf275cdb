"""Whether a tensor still has the bits that it had.

    word_sum   x -> the sum of its elements' bits, read as integers, modulo 2^64
    changed    x, such a sum -> whether x has another one now

Another value of one element always gives another sum; of changes in several it misses about one in 2^32. The
comparison is an operator, so that no compiler finds it equal to what it is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(x: Tensor) -> Tensor:
    """The bits of each element as an integer of its size; a complex one has two. A view."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(INTEGERS[x.element_size()])


def word_sum(x: Tensor) -> Tensor:
    """int64, no dimensions."""
    return words(x).sum(dtype=torch.int64)


@torch.library.custom_op("fxpasses::changed", mutates_args=())
def changed(x: Tensor, total: Tensor) -> Tensor:
    """bool, no dimensions: whether the words of `x` have another sum than `total` (int64, no dimensions)."""
    return word_sum(x) != total


@changed.register_fake
def _(x, total):
    return x.new_empty((), dtype=torch.bool)
