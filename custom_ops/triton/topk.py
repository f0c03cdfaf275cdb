"""`custom_ops.topk` in Triton: an exact selection, whatever the distribution.

A program takes a chunk at a time. It reads flat and residual once, writes their sum and counts magnitudes by
their exponent (a histogram). That gives the class of the smallest element that is sent; what lies in it or
above is collected, a few times what is sent. Three more histograms of those, of the other bits from the upper
ones down, give the exact threshold, and how many equal to it are sent. The chunk's second and last reading is
served by the cache.

A histogram takes time in proportion to its classes: for each 32 elements, a warp's lanes count all of them, 32
classes at a time. So there are four of 256 classes, and not fewer of more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.groups import gap_behind
from custom_ops.layout import CHUNK, HEADER_BYTES, TopKLayout
from custom_ops.triton.common import (
    INFINITY,
    MAGNITUDE,
    NAN,
    OPTIONS,
    bits_of,
    float_of,
    interpreted,
    raised,
    to_brain,
    tuned,
)
from custom_ops.triton.finish import finish

_CHUNK = tl.constexpr(CHUNK)
_CLASSES = tl.constexpr(256)
_EXPONENT = tl.constexpr(23)  # bits behind it
_HEADER = tl.constexpr(HEADER_BYTES // 2)  # in values of 16 bits
_PROGRAMS_PER_PROCESSOR = 2
_ENCODE_CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps)
    for tile, warps in ((4096, 16), (4096, 8), (2048, 8))
]
_DECODE_CONFIGS = [triton.Config({"TILE": 1024}, num_warps=warps) for warps in (4, 8)]


def topk_encode(
    flat: torch.Tensor, residual: torch.Tensor, layout: TopKLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    payload = flat.new_empty(layout.payload_bytes, dtype=torch.uint8)
    kept = torch.empty_like(residual)
    bad = flat.new_zeros(1, dtype=torch.int32)
    if layout.chunks:
        programs = min(layout.chunks, _programs(flat.device))
        found = flat.new_empty(programs * CHUNK, dtype=torch.int16)
        _encode[(programs,)](
            *(flat, residual, kept, payload.view(torch.int16), found, bad),
            *(layout.numel, *_quotas(layout), layout.offsets_offset // 2, layout.chunks),
            **OPTIONS,
        )
    gaps = gap_behind(layout.offsets_offset + 2 * layout.entries, layout.payload_bytes, flat.device)
    finish(payload, residual, kept, bad, gaps, layout.numel)
    return payload, kept


def topk_decode(payloads: torch.Tensor, layout: TopKLayout) -> torch.Tensor:
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    rows = payloads.shape[0]
    if layout.chunks:
        share = (torch.tensor(1.0, device="cpu") / rows).item()
        _decode[(layout.chunks,)](
            *(payloads, payloads.view(torch.int16), out, share, layout.payload_bytes),
            *(layout.numel, *_quotas(layout), layout.offsets_offset // 2, layout.chunks, rows),
            **OPTIONS,
        )
    return out


def _programs(device: torch.device) -> int:
    if interpreted():
        return 2
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _quotas(layout: TopKLayout) -> tuple[int, int]:
    return layout.quota(0), layout.quota(layout.chunks - 1)


@triton.jit
def _class_of_rank(counts, rank):
    """The class in which the `rank`-th largest lies (from 1), and how many lie above that class."""
    index = tl.arange(0, _CLASSES)
    from_here_up = tl.sum(counts) - tl.cumsum(counts) + counts
    found = tl.max(tl.where(from_here_up >= rank, index, 0))
    return found, tl.sum(tl.where(index > found, counts, 0))


@triton.jit
def _candidates(kept, found, entry, count):
    """Offsets and bits of what was collected."""
    exists = entry < count
    offset = tl.load(found + entry, mask=exists, other=0).to(tl.int32) & 0xFFFF
    bits = bits_of(tl.load(kept + offset, mask=exists, other=0.0))
    return exists, offset, bits


@triton.jit
def _narrowed(
    kept, found, count, prefix, left, BEHIND: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Of the candidates whose magnitudes begin with `prefix`, all bits but the `BEHIND` last, the `left`-th
    largest: its longer prefix, all but `SHIFT` bits, and its place among those that begin with that."""
    BITS: tl.constexpr = BEHIND - SHIFT
    within = tl.arange(0, TILE)
    counts = tl.zeros([_CLASSES], tl.int32)
    at = count * 0
    while at < count:
        exists, _, bits = _candidates(kept, found, at + within, count)
        magnitude = bits & MAGNITUDE
        begins = exists & ((magnitude >> BEHIND) == prefix)
        digit = tl.where(begins, (magnitude >> SHIFT) - (prefix << BITS), 0)
        counts += tl.histogram(digit, _CLASSES, mask=begins)
        at += TILE
    digit, above = _class_of_rank(counts, left)
    return (prefix << BITS) + digit, left - above


@tuned(configs=_ENCODE_CONFIGS)
@triton.jit(do_not_specialize=["quota", "last_quota", "offsets", "chunks"])
def _encode(
    flat, residual, kept, payload, found, bad, numel, quota, last_quota, offsets, chunks,
    TILE: tl.constexpr,
):  # fmt: skip
    """`offsets`: where the payload's offsets stand, in values of 16 bits. `found`: room for a chunk's
    candidates, for each program."""
    within = tl.arange(0, TILE)
    found += tl.program_id(0).to(tl.int64) * _CHUNK
    chunk = tl.program_id(0).to(tl.int64)
    while chunk < chunks:
        start = chunk * _CHUNK
        length = tl.minimum(numel - start, _CHUNK).to(tl.int32)
        room = tl.where(chunk == chunks - 1, last_quota, quota)
        values = payload + _HEADER + chunk * quota
        places = payload + offsets + chunk * quota

        counts = tl.zeros([_CLASSES], tl.int32)
        failed = tl.zeros([TILE], tl.int32)
        at = chunk.to(tl.int32) * 0
        while at < length:
            exists = at + within < length
            x = tl.load(flat + start + at + within, mask=exists, other=0.0).to(tl.float32)
            x += tl.load(residual + start + at + within, mask=exists, other=0.0)
            tl.store(kept + start + at + within, x, mask=exists)
            magnitude = bits_of(x) & MAGNITUDE
            failed = failed | (magnitude >= INFINITY).to(tl.int32)
            counts += tl.histogram(magnitude >> _EXPONENT, _CLASSES, mask=magnitude != 0)
            at += TILE
        raised(bad, failed)
        sent = tl.minimum(room, tl.sum(counts))
        exponent, above = _class_of_rank(counts, sent)
        tl.debug_barrier()

        count = length * 0
        at = length * 0
        while at < length:
            x = tl.load(kept + start + at + within, mask=at + within < length, other=0.0)
            magnitude = bits_of(x) & MAGNITUDE
            taken = ((magnitude >> _EXPONENT) >= exponent) & (magnitude != 0)
            number = count + tl.cumsum(taken.to(tl.int32)) - 1
            tl.store(found + number, (at + within).to(tl.int16), mask=taken)
            count += tl.sum(taken.to(tl.int32))
            at += TILE
        tl.debug_barrier()

        here = kept + start
        prefix, left = _narrowed(here, found, count, exponent, sent - above, _EXPONENT, 15, TILE)
        prefix, left = _narrowed(here, found, count, prefix, left, 15, 7, TILE)
        # `left` of those equal to the smallest that is sent are sent.
        smallest, left = _narrowed(here, found, count, prefix, left, 7, 0, TILE)
        tl.debug_barrier()

        entry = length * 0
        equal_before = length * 0
        at = length * 0
        while at < count:
            exists, offset, bits = _candidates(kept + start, found, at + within, count)
            magnitude = bits & MAGNITUDE
            equal = exists & (magnitude == smallest)
            rank = equal_before + tl.cumsum(equal.to(tl.int32)) - 1
            taken = exists & ((magnitude > smallest) | (equal & (rank < left)))
            number = entry + tl.cumsum(taken.to(tl.int32)) - 1
            brain = to_brain(bits)
            brain = tl.where((brain & 0x7FFF) == 0x7F80, brain - 1, brain)  # never infinity
            tl.store(values + number, brain.to(tl.int16), mask=taken)
            tl.store(places + number, offset.to(tl.int16), mask=taken)
            rest = float_of(bits) - float_of(brain << 16)
            tl.store(kept + start + offset, rest, mask=taken)
            equal_before += tl.sum(equal.to(tl.int32))
            entry += tl.sum(taken.to(tl.int32))
            at += TILE
        at = sent
        while at < room:
            tl.store(values + at + within, 0, mask=at + within < room)
            tl.store(places + at + within, 0, mask=at + within < room)
            at += TILE
        tl.debug_barrier()
        chunk += tl.num_programs(0)


@tuned("WORLD", configs=_DECODE_CONFIGS)
@triton.jit(do_not_specialize=["quota", "last_quota", "offsets", "chunks"])
def _decode(
    payloads, values, out, share, row_bytes, numel, quota, last_quota, offsets, chunks,
    WORLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A row's entries are at different offsets (or zero, or damaged), so their order does not matter; rows
    follow one another."""
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * _CHUNK
    length = tl.minimum(numel - start, _CHUNK).to(tl.int32)
    entries = tl.where(chunk == chunks - 1, last_quota, quota)
    within = tl.arange(0, TILE)
    finite = tl.load(payloads) == 1
    for row in range(1, WORLD):
        finite = finite & (tl.load(payloads + row * row_bytes.to(tl.int64)) == 1)
    background = tl.where(finite, 0.0, NAN)
    entries = tl.where(finite, entries, 0)
    at = length * 0
    while at < length:
        tl.store(out + start + at + within, background, mask=at + within < length)
        at += TILE
    for row in range(WORLD):
        tl.debug_barrier()
        first = values + row * (row_bytes.to(tl.int64) // 2) + chunk * quota
        at = length * 0
        while at < entries:
            exists = at + within < entries
            value = tl.load(first + _HEADER + at + within, mask=exists, other=0).to(tl.int32) << 16
            offset = tl.load(first + offsets + at + within, mask=exists, other=0)
            offset = offset.to(tl.int32) & 0xFFFF
            _add(out + start, offset, float_of(value) * share, exists & (offset < length))
            at += TILE


@triton.jit
def _add(sums, offset, values, ahead):
    """Atomic additions that keep subnormals: `tl.atomic_add` of floats in global memory takes them for zero."""
    ahead = ahead & (values != 0.0)  # a zero would change nothing
    words = sums.to(tl.pointer_type(tl.int32), bitcast=True) + tl.where(ahead, offset, 0)
    before = tl.load(words, mask=ahead, other=0)
    while tl.max(ahead.to(tl.int32)) != 0:
        after = bits_of(float_of(before) + values)
        seen = tl.atomic_cas(words, before, tl.where(ahead, after, before), sem="relaxed")
        ahead = ahead & (seen != before)
        before = seen
