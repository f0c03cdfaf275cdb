"""What stands where in a payload: pure integers, the same for fake, reference and compiled implementations.

A payload is one contiguous uint8 tensor of `shards` pieces of equal size. A piece can be decoded by itself,
so an all-to-all may send each to another rank. Every piece begins with a header of 8 bytes:

    byte  0      1 if all that was encoded was finite; anything else makes the whole piece decode to NaN
    byte  1      the scheme's own
    bytes 2-3    zero
    bytes 4-7    checksum (see `custom_ops.checksum`), zero if there is none

All numbers are little-endian.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

HEADER_BYTES = 8
ALIGNMENT_BYTES = 8
CHECKSUM_WORD = 1  # of 4 bytes
SHARD_ALIGNMENT = 16  # elements: a shard of fp32 starts at a cache line
HADAMARD = 32  # elements that a rotation mixes
CHUNK = 65_536  # elements that a 16-bit offset reaches
MOST_SHARDS_16 = 65_535  # a row of a GPU's grid each


class Segment(NamedTuple):
    """A parameter's elements within one shard; groups start anew here.

    Attributes:
        shard: index of the piece.
        start, length: elements of the flat bucket.
        group: index within the piece of its first group.
        code: offset of its first code, in bytes from the first code of the piece.
    """

    shard: int
    start: int
    length: int
    group: int
    code: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Payload of a bucket quantised to integers.

    Behind the header of a piece stand a bf16 scale for each group, then (asymmetric only) a uint8 zero point
    for each group, then the codes. A group's codes begin at a byte of their own. With 4 bits, byte `j` of a
    group of `m` elements holds element `j` in its low half and element `j + ceil(m / 2)` in its high half.

    Attributes:
        lengths: elements of each parameter in the bucket, in order; 0 is allowed.
        shards: number of pieces.
        bits: 8 or 4.
        group: elements that share a scale, a power of two. A parameter's (or shard's) last group may be
            shorter.
        symmetric: no zero point; zero is the middle code.
        rotate: each full block of 32 elements within a group is replaced by its Hadamard transform / 32.

    Raises:
        ValueError: for a value that does not fit, naming it.
    """

    lengths: tuple[int, ...]
    shards: int = 1
    bits: int = 8
    group: int = 128
    symmetric: bool = True
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits}: expected 4 or 8")
        if self.group < 1 or self.group & (self.group - 1):
            raise ValueError(f"group={self.group}: expected a power of two, 128 for example")
        if any(length < 0 for length in self.lengths):
            raise ValueError(
                f"lengths={list(self.lengths)}: expected numbers of elements, 0 or more"
            )
        if self.rotate and self.group < HADAMARD:
            raise ValueError(
                f"rotate=True needs groups of at least {HADAMARD} elements, got group={self.group}"
            )
        _check_shards(self.shards)

    @property
    def fields(self) -> tuple[Any, ...]:
        """What stands for the layout in the arguments of an operator."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return sum(self.lengths)

    @property
    def shard_numel(self) -> int:
        """Elements of each shard; the last ones may hold fewer of the bucket, or none."""
        return shard_numel(self.numel, self.shards)

    def held_by(self, shard: int) -> int:
        """Elements of the bucket in one shard."""
        return min(max(self.numel - shard * self.shard_numel, 0), self.shard_numel)

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Parameters cut at the borders of shards, in order."""
        found: list[Segment] = []
        start = shard = group = code = 0
        for length in self.lengths:
            end = start + length
            while start < end:
                if start == (shard + 1) * self.shard_numel:
                    shard, group, code = shard + 1, 0, 0
                taken = min(end, (shard + 1) * self.shard_numel) - start
                found.append(Segment(shard, start, taken, group, code))
                group += -(-taken // self.group)
                code += self.code_bytes(taken)
                start += taken
        return tuple(found)

    @functools.cached_property
    def groups(self) -> int:
        """Room for groups in a piece: what the fullest piece needs."""
        return max((s.group + -(-s.length // self.group) for s in self.segments), default=0)

    @property
    def zeros_offset(self) -> int:
        """Where a piece's zero points stand, in bytes."""
        return HEADER_BYTES + 2 * self.groups

    @property
    def codes_offset(self) -> int:
        """Where a piece's codes stand, in bytes."""
        return self.zeros_offset + (0 if self.symmetric else self.groups)

    @functools.cached_property
    def piece_bytes(self) -> int:
        codes = max((s.code + self.code_bytes(s.length) for s in self.segments), default=0)
        return _aligned(self.codes_offset + codes)

    @property
    def payload_bytes(self) -> int:
        return self.shards * self.piece_bytes

    def code_bytes(self, length: int) -> int:
        """Of one segment."""
        full, rest = divmod(length, self.group)
        return full * -(-self.group * self.bits // 8) + -(-rest * self.bits // 8)


@dataclasses.dataclass(frozen=True)
class Layout16:
    """Payload of a bucket in 16 bits: byte 1 of a piece's header is the exponent of its scale (int8), and the
    shard's values follow the header, in order, zeros behind them. So a piece is a payload of
    `Layout16(shard_numel, 1, dtype)`.

    Attributes:
        numel: elements of the bucket.
        shards: number of pieces.
        dtype: `fp16` or `bf16`.

    Raises:
        ValueError: for a value that does not fit, naming it.
    """

    numel: int
    shards: int = 1
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        if self.dtype not in ("fp16", "bf16"):
            raise ValueError(f"dtype={self.dtype!r}: expected 'fp16' or 'bf16'")
        if self.numel < 0:
            raise ValueError(f"numel={self.numel}: expected a number of elements, 0 or more")
        _check_shards(self.shards)
        if self.shards > MOST_SHARDS_16:
            raise ValueError(
                f"shards={self.shards}: expected at most {MOST_SHARDS_16} for 16-bit payloads"
            )

    @property
    def fields(self) -> tuple[Any, ...]:
        """What stands for the layout in the arguments of an operator."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def shard_numel(self) -> int:
        """Elements of each shard; the last ones may hold fewer of the bucket, or none."""
        return shard_numel(self.numel, self.shards)

    @property
    def piece_bytes(self) -> int:
        return _aligned(HEADER_BYTES + 2 * self.shard_numel)

    @property
    def payload_bytes(self) -> int:
        return self.shards * self.piece_bytes


@dataclasses.dataclass(frozen=True)
class TopKLayout:
    """Payload of the largest elements of a bucket, in one piece.

    The bucket is cut into chunks of 65,536 elements, each with a fixed number of entries. Behind the header
    stand all entries' values (bf16), chunk by chunk, then all their offsets within the chunk (uint16). An
    entry that isn't needed is the value 0 at offset 0.

    Attributes:
        numel: elements of the bucket.
        ratio: of the elements that are sent; a chunk sends `ceil(ratio * elements)`.

    Raises:
        ValueError: for a value that does not fit, naming it.
    """

    numel: int
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio}: expected a number in (0, 1], 0.01 for example")
        if self.numel < 0:
            raise ValueError(f"numel={self.numel}: expected a number of elements, 0 or more")

    @property
    def fields(self) -> tuple[Any, ...]:
        """What stands for the layout in the arguments of an operator."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def chunks(self) -> int:
        return -(-self.numel // CHUNK)

    def chunk_numel(self, chunk: int) -> int:
        return min(CHUNK, self.numel - chunk * CHUNK)

    def quota(self, chunk: int) -> int:
        """Entries of a chunk."""
        numel = self.chunk_numel(chunk)
        return min(numel, math.ceil(self.ratio * numel))

    @property
    def entries(self) -> int:
        """Of all chunks."""
        if not self.chunks:
            return 0
        return (self.chunks - 1) * self.quota(0) + self.quota(self.chunks - 1)

    @property
    def offsets_offset(self) -> int:
        """Where the offsets stand, in bytes."""
        return HEADER_BYTES + 2 * self.entries

    @property
    def payload_bytes(self) -> int:
        return _aligned(self.offsets_offset + 2 * self.entries)


def shard_numel(numel: int, shards: int) -> int:
    """Elements of each of `shards` shards."""
    return -(-numel // (shards * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT


def _check_shards(shards: int) -> None:
    if shards < 1:
        raise ValueError(f"shards={shards}: expected 1 (all-gather) or the number of ranks")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
