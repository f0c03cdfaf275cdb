"""The levels of compression with which all layers together send least, within a budget for the error.

After Markov et al., "L-GreCo: layerwise-adaptive gradient compression for efficient data-parallel deep
learning" (2022): dynamic programming over a discretised error. Errors are not measured, as there, but modelled:
those of Gaussian gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from fxpasses.compression import POWERSGD, Scheme

_STEPS = 1000  # of the budget


def cheapest(
    costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], budget: float
) -> list[int]:
    """For each layer the level to take, so that the sum of the costs is least and that of the errors at most
    the budget (or, where no choice is within it, the level of the least error for each).

    Args:
        costs, errors: for each layer those of its levels; not negative.

    Errors are rounded up to a thousandth of the budget, so that it is kept; a choice may be missed by that.
    """
    least = [int(np.argmin(row)) for row in errors]
    if budget <= 0:
        return least
    steps = [[math.ceil(e / budget * _STEPS - 1e-9) for e in row] for row in errors]
    best = np.full(_STEPS + 1, np.inf)  # by error used so far
    best[0] = 0.0
    taken: list[np.ndarray] = []
    for row, used in zip(costs, steps, strict=True):
        following = np.full(_STEPS + 1, np.inf)
        level = np.full(_STEPS + 1, -1)
        for index, (cost, step) in enumerate(zip(row, used, strict=True)):
            if step > _STEPS:
                continue
            candidate = np.full(_STEPS + 1, np.inf)
            candidate[step:] = best[: _STEPS + 1 - step] + cost
            better = candidate < following
            following[better], level[better] = candidate[better], index
        best = following
        taken.append(level)
    if not np.isfinite(best).any():
        return least
    at = int(np.argmin(best))
    choice: list[int] = []
    for level, used in zip(reversed(taken), reversed(steps), strict=True):
        choice.append(int(level[at]))
        at -= used[choice[-1]]
    return choice[::-1]


def bits(scheme: Scheme, shape: Sequence[int]) -> float:
    """Of a gradient of this shape on the wire, in all: those of one leg."""
    numel = math.prod(shape)
    if scheme.scheme == "topk":
        return 32 * math.ceil(scheme.ratio * numel)
    if scheme.scheme == POWERSGD:
        return 32 * scheme.rank * (shape[0] + numel // shape[0])
    return (scheme.bits + 16 / scheme.group) * numel


def relative_error(scheme: Scheme, shape: Sequence[int]) -> float:
    """The expected squared error of a Gaussian gradient, as a share of its squared norm."""
    if scheme.scheme == "topk":
        normal = statistics.NormalDist()
        threshold = normal.inv_cdf(1 - scheme.ratio / 2) if scheme.ratio < 1 else 0.0
        return 1 - (2 * threshold * normal.pdf(threshold) + scheme.ratio)
    if scheme.scheme == POWERSGD:
        return max(0.0, 1 - scheme.rank / min(shape[0], math.prod(shape[1:])))
    # The largest of a group's magnitudes is near this quantile, to a percent from groups of 8 on.
    largest = statistics.NormalDist().inv_cdf(1 - 0.3 / scheme.group)
    return (largest / (2 ** (scheme.bits - 1) - 1)) ** 2 / 12
