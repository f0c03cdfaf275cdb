"""Random bits for stochastic rounding: a hash of (seed, position), so that they are the same wherever they
are made.

Counter-based, as in Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3"; the mixing
function is the finaliser of Appleby's MurmurHash3.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_FACTORS = (0x85EBCA6B, 0xC2B2AE35)


def key_of(seed: int) -> int:
    """A 32-bit key from a 64-bit seed; seeds that differ little give unrelated keys."""
    return _mixed_int((seed & _WORD) ^ _mixed_int((seed >> 32 & _WORD) + 1))


def uniform(key: int, positions: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1), multiples of 2^-24.

    Args:
        key: from `key_of`.
        positions: int64; what counts is their low 32 bits.
    """
    x = (positions & _WORD) ^ key
    x = x ^ (x >> 16)
    x = (x * _FACTORS[0]) & _WORD
    x = x ^ (x >> 13)
    x = (x * _FACTORS[1]) & _WORD
    x = x ^ (x >> 16)
    return (x >> 8).float() * 2.0**-24


def _mixed_int(x: int) -> int:
    x ^= x >> 16
    x = x * _FACTORS[0] & _WORD
    x ^= x >> 13
    x = x * _FACTORS[1] & _WORD
    return x ^ x >> 16
