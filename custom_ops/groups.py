"""Where the groups of a quantised bucket stand, as tables that kernels for GPUs read.

Groups are numbered through all segments, so that any number of them can be given to a program; a program finds
the segments of its groups by bisection.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from custom_ops.layout import HEADER_BYTES, Layout

FIRST, START, LENGTH, PIECE, SCALE, ZERO, CODE = range(7)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Of a whole payload, or of the piece of one shard.

    Attributes:
        table: [7, S] int64, a column for each segment: number of its first group; its first element, and how
            many there are; bytes where its piece, first scale, first zero point and first code stand.
        segments: S, but at least 1.
        top: largest step of a bisection over segments, a power of two; 0 if there is one segment.
        count: groups.
        size: elements of a group: a power of two that all groups fit in.
        gaps: [2, 3, P] int64, a column for each piece: where the bytes behind its last scale, zero point and
            code begin and end, from its beginning. They are zero.
        aligned_elements, aligned_bytes: powers of two, up to 16, that divide the beginning of each group, and
            of its codes.
    """

    table: torch.Tensor
    segments: int
    top: int
    count: int
    size: int
    gaps: torch.Tensor
    aligned_elements: int
    aligned_bytes: int


@functools.cache  # never evicted: kernels in flight and recorded CUDA graphs read the tables
def groups_of(layout: Layout, shard: int | None, device: torch.device) -> Groups:
    """The tables for a layout, on a device; for a shard with bytes counted from the beginning of its piece."""
    columns: list[tuple[int, ...]] = []
    shards = range(layout.shards) if shard is None else range(shard, shard + 1)
    ends = {s: [HEADER_BYTES, layout.zeros_offset, layout.codes_offset] for s in shards}
    count, longest = 0, 1
    for segment in layout.segments:
        if segment.shard not in ends:
            continue
        piece = segment.shard * layout.piece_bytes if shard is None else 0
        scale = HEADER_BYTES + 2 * segment.group
        zero = layout.zeros_offset + segment.group
        code = layout.codes_offset + segment.code
        columns.append(
            (
                *(count, segment.start, segment.length),
                *(piece, piece + scale, piece + zero, piece + code),
            )
        )
        groups = -(-segment.length // layout.group)
        zero_end = zero + groups if not layout.symmetric else layout.codes_offset
        ends[segment.shard] = [
            scale + 2 * groups,
            zero_end,
            code + layout.code_bytes(segment.length),
        ]
        count, longest = count + groups, max(longest, segment.length)
    borders = [layout.zeros_offset, layout.codes_offset, layout.piece_bytes]
    gaps = [list(ends.values()), [borders] * len(ends)]
    size = min(layout.group, 1 << (longest - 1).bit_length())
    return Groups(
        table=torch.tensor(columns or [(0,) * 7], dtype=torch.int64).T.contiguous().to(device),
        segments=max(len(columns), 1),
        top=(1 << (len(columns) - 1).bit_length()) // 2 if columns else 0,
        count=count,
        size=size,
        gaps=torch.tensor(gaps, dtype=torch.int64).transpose(1, 2).contiguous().to(device),
        aligned_elements=math.gcd(16, size, *(c[START] for c in columns)),
        aligned_bytes=math.gcd(
            16, -(-size * layout.bits // 8), *(x for c in columns for x in (c[PIECE], c[CODE]))
        ),
    )


@functools.cache  # never evicted: kernels in flight and recorded CUDA graphs read the tables
def gap_behind(end: int, size: int, device: torch.device) -> torch.Tensor:
    """`Groups.gaps` of a payload of one piece, with nothing behind `end`."""
    return torch.tensor([[[end]], [[size]]]).to(device)
