"""How often something happened, and how sure that is."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence

Z = 1.96  # 95 %


def wilson(count: int, total: int, z: float = Z) -> tuple[float, float]:
    """The interval of a share (Wilson, J. Am. Stat. Assoc. 22, 1927); (0, 1) of nothing.

    Args:
        count, total: how often, of how many.
        z: deviations; 1.96 is a confidence of 95 %.
    """
    if not total:
        return 0.0, 1.0
    share, factor = count / total, z * z / total
    middle = (share + factor / 2) / (1 + factor)
    half = z / (1 + factor) * math.sqrt(share * (1 - share) / total + factor / (4 * total))
    # At the ends it is exact.
    low = 0.0 if count == 0 else middle - half
    high = 1.0 if count == total else middle + half
    return max(low, 0.0), min(high, 1.0)


def by(
    rows: Iterable[Mapping[str, str]], keys: Sequence[str]
) -> dict[tuple[str, ...], collections.Counter[str]]:
    """Outcomes counted, by the values of some columns, in the order of these."""
    found: dict[tuple[str, ...], collections.Counter[str]] = {}
    for row in rows:
        group = tuple(row[key] for key in keys)
        found.setdefault(group, collections.Counter())[row["outcome"]] += 1
    return dict(sorted(found.items(), key=lambda item: [_natural(word) for word in item[0]]))


def _natural(word: str) -> tuple[int, float, str]:
    return (0, float(word), "") if word.lstrip("-").isdigit() else (1, 0.0, word)
