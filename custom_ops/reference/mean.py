"""The mean of W payloads, in one fixed order and without overflow."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

LARGEST = torch.finfo(torch.float32).max


def down(rows: int) -> float:
    """What each value is multiplied by before they are summed: a power of two, at most 1 / (2 W)."""
    return 2.0 ** -(1 + (rows - 1).bit_length())


def in_order(shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, from the first to the last."""
    return functools.reduce(torch.add, shares)


def factors(rows: int) -> tuple[float, float]:
    """What values are multiplied by before they are summed, and their sum afterwards."""
    after = torch.tensor(1 / down(rows), dtype=torch.float32, device="cpu") / rows
    return down(rows), after.item()


def finish(sums: torch.Tensor, rows: int) -> torch.Tensor:
    """The mean from the fp32 sum of values times `down`; infinities become the largest number."""
    return (sums * factors(rows)[1]).clamp(-LARGEST, LARGEST)
