"""What all kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from custom_ops.kernels import interpreted

# A fused multiply-add rounds once where other machines round twice.
OPTIONS = {"enable_fp_fusion": False}

INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-(2**31))
LARGEST = tl.constexpr(3.4028234663852886e38)
WHOLE = tl.constexpr(2.0**23)  # from here on all floats are whole numbers
NAN = tl.constexpr(float("nan"))

# At most 16 elements a thread: with 32 registers run out.
_CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps)
    for tile, warps in ((2048, 4), (1024, 4), (4096, 8), (2048, 8), (1024, 8), (512, 4))
]


# For kernels that hold more of each element.
SMALL_CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps)
    for tile, warps in ((1024, 4), (2048, 8), (512, 4), (1024, 8))
]


def tuned(*key: str, configs=_CONFIGS):
    """Autotuned over TILE, elements of a program, and warps; anew for other values of the arguments `key`. The
    interpreter takes the first configuration. Results are the same for all of them."""
    tried = configs[:1] if interpreted() else configs
    return triton.autotune(tried, list(key), prune_configs_by={"early_config_prune": _fitting})


def _fitting(configs, named, **kwargs):
    """A rotation holds each element twice."""
    if not named.get("ROTATE"):
        return configs
    return [c for c in configs if c.kwargs["TILE"] <= 4 * 32 * c.num_warps]


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def clamped(x):
    """An infinity that rounding made becomes the largest number; NaN stays."""
    x = tl.where(x > LARGEST, LARGEST, x)
    return tl.where(x < -LARGEST, -LARGEST, x)


@triton.jit
def nearest(x):
    """The nearest whole number, even at ties, with the sign of x. For |x| <= 2^22."""
    whole = (tl.abs(x) + WHOLE) - WHOLE
    return float_of(bits_of(whole) | (bits_of(x) & SIGN))


@triton.jit
def floor(x):
    """As `tl.floor`, which flushes subnormals to zero. For |x| <= 2^22."""
    whole = nearest(x)
    return whole - (whole > x).to(tl.float32)


@triton.jit
def ceil(x):
    """The same upwards."""
    whole = nearest(x)
    return whole + (whole < x).to(tl.float32)


@triton.jit
def to_brain(bits):
    """The nearest bf16, as int32, of a finite float's bits."""
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def raised(flag, failed):
    """Set a flag in memory where any of `failed` is not 0."""
    if tl.max(failed) != 0:
        tl.atomic_max(flag, 1)
