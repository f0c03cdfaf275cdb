"""An operator that damages one element of a tensor, if a row of numbers in memory says so.

    strike    x, row [5]    -> x with an element changed, and what happened [4]

    row   int64   site, index, keep, flip, key    the element at `index`, modulo their number, becomes
                                                  (bits & keep) ^ flip if `site` is this one
    news  int64   hits, index, bits before, bits after    all zero if nothing happened

Pure; the same as `fxpasses.faults.models` writes in ATen operators for Inductor to fuse with what surrounds it.
Where nothing is fused this is one copy. Its gradient is that of no damage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from custom_ops import kernels

ROW, NEWS = 5, 4
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@kernels.operator("strike")
def strike(x: Tensor, row: Tensor, site: int) -> tuple[Tensor, Tensor]:
    """A copy of a tensor, with an element damaged if that is armed.

    Args:
        x: any shape, contiguous, of a real dtype.
        row: [5] int64, on the same device.
        site: the number of this place.

    Returns:
        The copy, and the news, [4] int64; bits are those of a signed integer of the dtype's size.

    Raises:
        ValueError: for a tensor that does not fit.
    """
    _check(x, row)
    return kernels.call("faults.strike", x, x, row, site)


@strike.register_fake
def _(x, row, site):
    _check(x, row)
    return torch.empty_like(x), row.new_empty(NEWS)


def _check(x: Tensor, row: Tensor) -> None:
    if x.dtype.itemsize not in INTEGERS or x.is_complex() or not x.is_contiguous():
        contiguous = "" if x.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"x: expected a contiguous tensor of real numbers, got {x.dtype}{contiguous}"
        )
    if row.dtype != torch.int64 or row.shape != (ROW,) or not row.is_contiguous():
        raise ValueError(
            f"row: expected a contiguous int64 tensor of shape [{ROW}], got {row.dtype} of shape "
            f"{list(row.shape)}"
        )


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, of_x: Tensor, of_news: Tensor) -> tuple[Tensor, None, None]:
    return of_x.clone(), None, None


strike.register_autograd(_backward, setup_context=_keep)
