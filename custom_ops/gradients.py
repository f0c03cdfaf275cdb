"""An operator that does in one pass over memory what a step does with its gradients before they are used.

    unscale   flat [n], factor                -> flat * factor [n] fp32, whether any is not finite, the norm

Pure. Products are rounded once, to fp32. The norm is the square root of a sum of squares in fp64, rounded to
fp32, so it overflows where the norm does, not where a square does. The order of the sum, so at most its last
bit, differs from one implementation to another, never from call to call.

Unscaled gradients and norm can be differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from custom_ops import checks, kernels


@kernels.operator("unscale")
def unscale(flat: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply, and look at the products.

    Args:
        flat: [n] fp32, bf16 or fp16, contiguous.
        factor: one fp32 number on the same device: the reciprocal of a loss scale, for example.

    Returns:
        flat * factor, [n]; 1.0 if any of that is NaN or infinite, else 0.0, []; the norm of it, []. All fp32.

    Raises:
        ValueError: for a tensor that does not fit.
    """
    _check(flat, factor)
    return kernels.call("gradients.unscale", flat, flat, factor)


@unscale.register_fake
def _(flat, factor):
    _check(flat, factor)
    numbers = flat.new_empty((), dtype=torch.float32), flat.new_empty((), dtype=torch.float32)
    return torch.empty_like(flat, dtype=torch.float32), *numbers


def _check(flat: Tensor, factor: Tensor) -> None:
    checks.vector("flat", flat, flat.numel(), checks.FLOATS)
    if factor.dtype != torch.float32 or factor.numel() != 1:
        raise ValueError(
            f"factor: expected one float32 number, got {factor.dtype} of shape {list(factor.shape)}"
        )


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    flat, factor = inputs
    unscaled, found_inf, norm = output
    ctx.mark_non_differentiable(found_inf)
    ctx.save_for_backward(flat, factor, unscaled, norm)


def _backward(ctx: Any, of_unscaled: Tensor, of_found: Tensor, of_norm: Tensor) -> tuple:
    flat, factor, unscaled, norm = ctx.saved_tensors
    direction = torch.where(norm > 0, unscaled / norm, 0.0)
    total = of_unscaled + of_norm * direction
    of_factor = (total * flat.float()).sum().reshape(factor.shape)
    return (total * factor).to(flat.dtype), of_factor


unscale.register_autograd(_backward, setup_context=_keep)
