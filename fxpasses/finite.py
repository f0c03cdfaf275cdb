"""Numbers that need not be finite, and which of them are: tensor code for `splice`."""

from __future__ import annotations

from torch import Tensor


def is_inexact(x: Tensor) -> bool:
    """Whether its elements are floating-point numbers, real or complex."""
    return x.is_floating_point() or x.is_complex()


def is_finite(x: Tensor) -> Tensor:
    """bool, in the shape of `x`, real or complex: torch's own way for complex numbers is not functional."""
    return x.real.isfinite() & x.imag.isfinite() if x.is_complex() else x.isfinite()
