"""The difference of two texts whose lines are mostly unique, as those of graphs are.

Lines that stand once in each text are matched first, in the longest common order (patience diff); what lies
between two matches is compared by `difflib` if it is short. So the time grows
as n log n, however many places differ.
"""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

_SHORT = 400  # lines: what difflib may compare, at worst in quadratic time
_CONTEXT = 3

Block = tuple[int, int, int, int]  # old lines [a, b) became new lines [c, d)


def unified(
    old: Sequence[str], new: Sequence[str], names: tuple[str, str], skip: tuple[int, int] = (0, 0)
) -> list[str]:
    """A unified diff; empty if nothing differs.

    Args:
        names: of the two files.
        skip: how many lines stand in front of the texts in the two files.
    """
    changes = [b for b in blocks(old, new) if old[b[0] : b[1]] != new[b[2] : b[3]]]
    if not changes:
        return []
    lines = [f"--- {names[0]}", f"+++ {names[1]}"]
    for hunk in _hunks(changes):
        lines += _rendered(hunk, old, new, skip)
    return lines


def blocks(old: Sequence[str], new: Sequence[str]) -> Iterator[Block]:
    """What became what, in order: equal parts and changed ones."""
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    stop_old, stop_new = len(old) - end, len(new) - end
    yield 0, start, 0, start
    at_old, at_new = start, start
    for i, j in _anchors(old[start:stop_old], new[start:stop_new]):
        i, j = i + start, j + start
        yield from _between(old, new, (at_old, i, at_new, j))
        yield i, i + 1, j, j + 1
        at_old, at_new = i + 1, j + 1
    yield from _between(old, new, (at_old, stop_old, at_new, stop_new))
    yield stop_old, len(old), stop_new, len(new)


def _common(old: Sequence[str], new: Sequence[str]) -> int:
    """How many lines at the beginning are the same."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Lines that stand once in each, as (old, new) positions that rise in both."""
    once_old, once_new = (Counter(lines) for lines in (old, new))
    places = {line: j for j, line in enumerate(new) if once_new[line] == 1}
    pairs = [(i, places[x]) for i, x in enumerate(old) if once_old[x] == 1 and x in places]
    return _rising(pairs)


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence whose second numbers rise."""
    ends: list[int] = []  # smallest last number of a rising sequence of each length
    last: list[int] = []  # and which pair that is
    before: list[int] = []
    for position, (_, j) in enumerate(pairs):
        length = bisect.bisect_left(ends, j)
        before.append(last[length - 1] if length else -1)
        if length == len(ends):
            ends.append(j)
            last.append(position)
        else:
            ends[length], last[length] = j, position
    found: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        found.append(pairs[at])
        at = before[at]
    return found[::-1]


def _between(old: Sequence[str], new: Sequence[str], block: Block) -> Iterator[Block]:
    a, b, c, d = block
    if a == b or c == d or b - a + d - c > _SHORT:
        yield block
        return
    matcher = difflib.SequenceMatcher(None, old[a:b], new[c:d], autojunk=False)
    for _, i, j, k, m in matcher.get_opcodes():
        yield a + i, a + j, c + k, c + m


def _hunks(changes: Sequence[Block]) -> Iterator[list[Block]]:
    hunk = [changes[0]]
    for change in changes[1:]:
        if change[0] - hunk[-1][1] > 2 * _CONTEXT:
            yield hunk
            hunk = []
        hunk.append(change)
    yield hunk


def _rendered(
    hunk: list[Block], old: Sequence[str], new: Sequence[str], skip: tuple[int, int]
) -> Iterator[str]:
    first, last = hunk[0], hunk[-1]
    lead = min(_CONTEXT, first[0])
    trail = min(_CONTEXT, len(old) - last[1])
    counts = (last[1] + trail - first[0] + lead, last[3] + trail - first[2] + lead)
    # The first line, or that in front of where there is none.
    begins = (
        first[0] - lead + skip[0] + bool(counts[0]),
        first[2] - lead + skip[1] + bool(counts[1]),
    )
    yield f"@@ -{begins[0]},{counts[0]} +{begins[1]},{counts[1]} @@"
    at = first[0] - lead
    for a, b, c, d in hunk:
        yield from (f" {line}" for line in old[at:a])
        yield from (f"-{line}" for line in old[a:b])
        yield from (f"+{line}" for line in new[c:d])
        at = b
    yield from (f" {line}" for line in old[at : at + trail])
