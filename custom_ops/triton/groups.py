"""A tile of groups: where its rows stand, and codes on their way between registers and memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places(
    table, segments, top, number, count, GROUP: tl.constexpr, CODES: tl.constexpr,
    ALIGNED: tl.constexpr, BYTES_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Of groups by number: first element, length (0 beyond the last group), and bytes of piece, scale, zero
    point and codes. `CODES` are the bytes of a whole group's codes."""
    segment = tl.zeros_like(number)
    step = top
    while step > 0:
        after = segment + step
        first = tl.load(table + after, mask=after < segments, other=1 << 62)
        segment = tl.where(first <= number, after, segment)
        step = step // 2
    within = number - tl.load(table + segment)
    length = tl.load(table + 2 * segments + segment) - within * GROUP
    length = tl.where(number < count, tl.minimum(length, GROUP), 0)
    start = tl.load(table + segments + segment) + within * GROUP
    piece = tl.load(table + 3 * segments + segment)
    scale = tl.load(table + 4 * segments + segment) + within * 2
    zero = tl.load(table + 5 * segments + segment) + within
    code = tl.load(table + 6 * segments + segment) + within * CODES
    # Said here, where the sums are made: it is lost on what a function returns.
    start = tl.multiple_of(start, ALIGNED)
    code = tl.multiple_of(code, BYTES_ALIGNED)
    return start, length, piece, scale, zero, code


@triton.jit
def load_rows(pointer, start, length, GROUP: tl.constexpr):
    """[rows, GROUP] fp32; zeros behind the end of a group."""
    within = tl.arange(0, GROUP)
    at = pointer + start[:, None] + within[None, :]
    if tl.min(length) == GROUP:  # without a mask, so in wide accesses
        values = tl.load(at)
    else:
        values = tl.load(at, mask=within[None, :] < length[:, None], other=0.0)
    return values.to(tl.float32)


@triton.jit
def store_rows(pointer, start, length, values, GROUP: tl.constexpr):
    within = tl.arange(0, GROUP)
    at = pointer + start[:, None] + within[None, :]
    if tl.min(length) == GROUP:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=within[None, :] < length[:, None])


@triton.jit
def store_codes(
    payload, code, length, codes, GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr
):
    """Codes [rows, GROUP] int32 as bytes."""
    if BITS == 8 or GROUP == 1:
        store_rows(payload, code, length, codes.to(tl.uint8), GROUP)
    else:
        HALF: tl.constexpr = GROUP // 2
        byte = tl.arange(0, HALF)
        at = payload + code[:, None] + byte[None, :]
        if tl.min(length) == GROUP:
            halves = tl.permute(tl.reshape(codes, (ROWS, 2, HALF)), (0, 2, 1))
            low, high = tl.split(halves)
            tl.store(at, (low | (high << 4)).to(tl.uint8))
        else:
            bytes_used = ((length + 1) // 2)[:, None]
            partner = byte[None, :] + bytes_used
            both = partner < length[:, None]
            low = tl.gather(codes, tl.broadcast_to(byte[None, :], (ROWS, HALF)), 1)
            high = tl.gather(codes, tl.where(both, partner, 0).to(tl.int32), 1)
            packed = low | tl.where(both, high << 4, 0)
            tl.store(at, packed.to(tl.uint8), mask=byte[None, :] < bytes_used)


@triton.jit
def load_codes(payload, code, length, GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr):
    """[rows, GROUP] fp32."""
    within = tl.arange(0, GROUP)
    inside = within[None, :] < length[:, None]
    if BITS == 8:
        codes = load_rows(payload, code, length, GROUP)
    elif GROUP == 1:
        codes = (tl.load(payload + code[:, None] + within[None, :], mask=inside, other=0) & 15).to(
            tl.float32
        )
    else:
        HALF: tl.constexpr = GROUP // 2
        if tl.min(length) == GROUP:
            pairs = tl.load(payload + code[:, None] + tl.arange(0, HALF)[None, :])
            halves = tl.permute(tl.join(pairs & 15, pairs >> 4), (0, 2, 1))
            codes = tl.reshape(halves, (ROWS, GROUP)).to(tl.float32)
        else:
            bytes_used = ((length + 1) // 2)[:, None]
            is_high = within[None, :] >= bytes_used
            byte = within[None, :] - tl.where(is_high, bytes_used, 0)
            packed = tl.load(payload + code[:, None] + byte, mask=inside, other=0)
            codes = tl.where(is_high, packed >> 4, packed & 15).to(tl.float32)
    return codes


@triton.jit
def in_block(length, GROUP: tl.constexpr):
    """[rows, GROUP]: whether an element belongs to a full block of 32, which a rotation mixes."""
    within = tl.arange(0, GROUP)
    return (within // 32 * 32 + 32)[None, :] <= length[:, None]


@triton.jit
def transform(values, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Walsh-Hadamard transform of each 32, without a scale, in the order of the reference's additions."""
    BLOCKS: tl.constexpr = ROWS * GROUP // 32
    x = tl.reshape(values, (BLOCKS, 32))
    for _ in tl.static_range(5):
        even, odd = tl.split(tl.reshape(x, (BLOCKS, 16, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (BLOCKS, 32))
    return tl.reshape(x, (ROWS, GROUP))
