"""`custom_ops.noise` in kernels: the same hash."""

from __future__ import annotations

import triton
import triton.language as tl

WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def key_of(seed):
    """A 32-bit key from an int64."""
    wide = seed.to(tl.uint64, bitcast=True)
    high = (wide >> 32) + 1  # 33 bits, perhaps
    high = ((high ^ (high >> 16)) * 0x85EBCA6B) & WORD
    high = ((high ^ (high >> 13)) * 0xC2B2AE35) & WORD
    return _mixed(((wide & WORD) ^ high ^ (high >> 16)).to(tl.uint32))


@triton.jit
def uniform(key, positions):
    """fp32 in [0, 1), multiples of 2^-24, for int64 positions."""
    return (_mixed(positions.to(tl.uint32) ^ key) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
