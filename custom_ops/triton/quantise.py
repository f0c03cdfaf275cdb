"""`custom_ops.quantise` in Triton.

A program encodes a tile of whole groups: it reads each element once and writes codes, scales and what is lost.
That something is not finite is seen by then, so a second kernel, which reads one flag and else writes headers,
takes all back in that case.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops import outputs
from custom_ops.groups import Groups, groups_of
from custom_ops.layout import HADAMARD, Layout
from custom_ops.reference import mean
from custom_ops.reference.quantise import SMALLEST_SCALE, middle
from custom_ops.triton import noise
from custom_ops.triton.common import (
    INFINITY,
    MAGNITUDE,
    NAN,
    OPTIONS,
    SMALL_CONFIGS,
    bits_of,
    ceil,
    clamped,
    float_of,
    floor,
    nearest,
    raised,
    tuned,
)
from custom_ops.triton.finish import finish
from custom_ops.triton.groups import (
    in_block,
    load_codes,
    load_rows,
    places,
    store_codes,
    store_rows,
    transform,
)

LONGEST_GROUP = 2048  # elements: more, and registers run out
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_BLOCK = tl.constexpr(HADAMARD)


def quantise(
    flat: torch.Tensor, residual: torch.Tensor | None, seed: torch.Tensor | None, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = _groups(layout, None, flat.device)
    payload, lost = outputs.payload_and_residual(layout.payload_bytes, residual, flat)
    bad = flat.new_zeros(1, dtype=torch.int32)
    if groups.count:
        _quantise[_grid(groups)](
            *(flat, residual, seed, payload, payload.view(torch.int16), lost, bad),
            *_arguments(groups),
            *_constants(layout, groups),
            *(seed is not None, residual is not None),
            **OPTIONS,
        )
    finish(payload, residual, lost, bad, groups.gaps, layout.numel)
    return payload, lost


def dequantise(payloads: torch.Tensor, layout: Layout) -> torch.Tensor:
    groups = _groups(layout, None, payloads.device)
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    if groups.count:
        rows = payloads.shape[0]
        _dequantise[_grid(groups)](
            *(payloads, payloads.view(torch.int16), out, *mean.factors(rows), layout.payload_bytes),
            *_arguments(groups),
            *_constants(layout, groups),
            rows,
            **OPTIONS,
        )
    return out


def requantise(
    pieces: torch.Tensor,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    shard: int,
    layout: Layout,
    out_layout: Layout,
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = _groups(layout, shard, pieces.device)
    out_groups = _groups(out_layout, shard, pieces.device)
    piece, lost = outputs.payload_and_residual(out_layout.piece_bytes, residual, pieces)
    bad = pieces.new_zeros(1, dtype=torch.int32)
    rows = pieces.shape[0]
    first = shard * layout.shard_numel
    if groups.count:
        _requantise[_grid(groups)](
            *(pieces, pieces.view(torch.int16), *mean.factors(rows), layout.piece_bytes),
            *(residual, seed, piece, piece.view(torch.int16), lost, bad, first),
            *(*_arguments(groups), out_groups.table),
            *_constants(layout, groups),
            *(out_layout.bits, float(middle(out_layout)), _step(out_layout)),
            *(out_groups.aligned_bytes, rows, seed is not None, residual is not None),
            **OPTIONS,
        )
    held = layout.held_by(shard)
    finish(piece, residual, lost, bad, out_groups.gaps, held, pieces)
    return piece, lost


def _groups(layout: Layout, shard: int | None, device: torch.device) -> Groups:
    groups = groups_of(layout, shard, device)
    if groups.size > LONGEST_GROUP:
        raise ValueError(
            f"group={layout.group}: Triton's kernels take groups of up to {LONGEST_GROUP} elements; choose "
            "smaller groups, or FXPASSES_KERNELS=cuda"
        )
    return groups


def _grid(groups: Groups):
    return lambda meta: (triton.cdiv(groups.count, max(1, meta["TILE"] // groups.size)),)


def _arguments(groups: Groups) -> tuple:
    return groups.table, groups.segments, groups.top, groups.count


def _constants(layout: Layout, groups: Groups) -> tuple:
    return (
        *(groups.size, layout.bits, layout.symmetric, layout.rotate),
        *(float(middle(layout)), _step(layout)),
        *(groups.aligned_elements, groups.aligned_bytes),
    )


def _step(layout: Layout) -> float:
    """What a span is multiplied by to become a scale, an fp32 number."""
    exact = (1 + 2.0**-16) / (2**layout.bits - 2)
    return torch.tensor(exact, dtype=torch.float32, device="cpu").item()


@triton.jit
def _encoded(
    values,
    start,
    length,
    key,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ROTATE: tl.constexpr,
    MIDDLE: tl.constexpr,
    STEP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Codes [rows, GROUP] int32, scale and zero point [rows], what they decode to, and 1 for each row that is
    not finite."""
    coded = values
    if ROTATE:
        rotated = in_block(length, GROUP)
        coded = tl.where(rotated, transform(values * (1.0 / _BLOCK), GROUP, ROWS), values)
    if SYMMETRIC:
        largest = tl.max(bits_of(coded) & MAGNITUDE, 1)
        failed = (largest >= INFINITY).to(tl.int32)
        high = float_of(largest)
        low = -high
    else:
        bits = bits_of(coded)
        ordered = bits ^ ((bits >> 31) & MAGNITUDE)  # integers in the order of the floats
        largest = tl.maximum(tl.max(ordered, 1), 0)
        smallest = tl.minimum(tl.min(ordered, 1), 0)
        # The order of -infinity is that of its bits as they are, but for the sign, from below.
        failed = ((largest >= INFINITY) | (smallest <= -INFINITY - 1)).to(tl.int32)
        high = float_of(largest)
        low = tl.where(smallest < 0, float_of(smallest ^ MAGNITUDE), 0.0)
    exact = tl.maximum(high * STEP - low * STEP, _SMALLEST)
    scale = float_of((bits_of(exact) + 0xFFFF) & -65536)
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
    if SYMMETRIC:
        zero = tl.full([ROWS], MIDDLE, tl.float32)
    else:
        zero = ceil(-low * inverse)
    scaled = coded * inverse[:, None]
    if STOCHASTIC:
        below = floor(scaled)
        position = start[:, None] + tl.arange(0, GROUP)[None, :]
        points = below + (noise.uniform(key, position) < scaled - below).to(tl.float32)
    else:
        points = nearest(scaled)
    codes = (points + zero[:, None]).to(tl.int32)
    if ROTATE:
        halved = points * (scale * 0.5)[:, None]
        sums = tl.where(rotated, transform(halved, GROUP, ROWS), halved)
        decoded = clamped(sums * 2.0)
    else:
        decoded = clamped(points * scale[:, None])
    return codes, scale, zero, decoded, failed


@triton.jit
def _store(
    payload, scales, scale_at, zero_at, code_at, length, codes, scale, zero,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    tl.store(scales + scale_at // 2, (bits_of(scale) >> 16).to(tl.int16), mask=length > 0)
    if not SYMMETRIC:
        tl.store(payload + zero_at, zero.to(tl.int32).to(tl.uint8), mask=length > 0)
    store_codes(payload, code_at, length, codes, GROUP, ROWS, BITS)


@triton.jit
def _share(
    payloads, scales, piece_row, scale_at, zero_at, code_at, length, down,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """What one payload's groups decode to, times `down`."""
    exists = length > 0
    half = tl.load(scales + (piece_row + scale_at) // 2, mask=exists, other=0)
    scale = float_of(half.to(tl.int32) << 16) * down
    codes = load_codes(payloads, piece_row + code_at, length, GROUP, ROWS, BITS)
    if SYMMETRIC:
        points = codes - MIDDLE
    else:
        zero = tl.load(payloads + piece_row + zero_at, mask=exists, other=0).to(tl.float32)
        points = codes - zero[:, None]
    return points * scale[:, None]


@triton.jit
def _mean(
    payloads, scales, scale_at, zero_at, code_at, length, down, factor, row_bytes,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr,
    ROTATE: tl.constexpr, MIDDLE: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    sums = _share(
        payloads, scales, 0, scale_at, zero_at, code_at, length, down,
        GROUP, ROWS, BITS, SYMMETRIC, MIDDLE,
    )  # fmt: skip
    # A multiple of 8, which the compiler learns from a multiplication only, where 16 does not divide it.
    row_words = row_bytes.to(tl.int64) // 8
    for row in range(1, WORLD):
        sums += _share(
            payloads, scales, row * row_words * 8, scale_at, zero_at, code_at, length, down,
            GROUP, ROWS, BITS, SYMMETRIC, MIDDLE,
        )  # fmt: skip
    if ROTATE:
        sums = tl.where(in_block(length, GROUP), transform(sums, GROUP, ROWS), sums)
    return clamped(sums * factor)


@triton.jit
def _tile(
    table, segments, top, count, GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    ALIGNED: tl.constexpr, BYTES_ALIGNED: tl.constexpr,
):  # fmt: skip
    CODES: tl.constexpr = (GROUP * BITS + 7) // 8
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return places(table, segments, top, number, count, GROUP, CODES, ALIGNED, BYTES_ALIGNED)


@tuned("GROUP", "BITS", "SYMMETRIC", "ROTATE", "STOCHASTIC", "FEEDBACK")
@triton.jit(do_not_specialize=["segments", "top", "count"])
def _quantise(
    flat, residual, seed, payload, scales, lost, bad, table, segments, top, count,
    GROUP: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROTATE: tl.constexpr,
    MIDDLE: tl.constexpr, STEP: tl.constexpr,
    ALIGNED: tl.constexpr, BYTES_ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // GROUP if TILE > GROUP else 1
    start, length, _, scale_at, zero_at, code_at = _tile(
        table, segments, top, count, GROUP, ROWS, BITS, ALIGNED, BYTES_ALIGNED
    )
    values = load_rows(flat, start, length, GROUP)
    if FEEDBACK:
        values += load_rows(residual, start, length, GROUP)
    key = 0
    if STOCHASTIC:
        key = noise.key_of(tl.load(seed))
    codes, scale, zero, decoded, failed = _encoded(
        values, start, length, key, GROUP, ROWS, SYMMETRIC, ROTATE, MIDDLE, STEP, STOCHASTIC
    )
    _store(
        payload, scales, scale_at, zero_at, code_at, length, codes, scale, zero,
        GROUP, ROWS, BITS, SYMMETRIC,
    )  # fmt: skip
    if FEEDBACK:
        store_rows(lost, start, length, values - decoded, GROUP)
    raised(bad, failed)


@tuned("GROUP", "BITS", "SYMMETRIC", "ROTATE", "WORLD")
@triton.jit(do_not_specialize=["segments", "top", "count"])
def _dequantise(
    payloads, scales, out, down, factor, row_bytes, table, segments, top, count,
    GROUP: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROTATE: tl.constexpr,
    MIDDLE: tl.constexpr, STEP: tl.constexpr,
    ALIGNED: tl.constexpr, BYTES_ALIGNED: tl.constexpr,
    WORLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // GROUP if TILE > GROUP else 1
    start, length, piece, scale_at, zero_at, code_at = _tile(
        table, segments, top, count, GROUP, ROWS, BITS, ALIGNED, BYTES_ALIGNED
    )
    means = _mean(
        payloads, scales, scale_at, zero_at, code_at, length, down, factor, row_bytes,
        GROUP, ROWS, BITS, SYMMETRIC, ROTATE, MIDDLE, WORLD,
    )  # fmt: skip
    finite = tl.full([ROWS], 1, tl.int1)
    for row in range(WORLD):
        flag = tl.load(payloads + row * row_bytes.to(tl.int64) + piece, mask=length > 0, other=1)
        finite = finite & (flag == 1)
    store_rows(out, start, length, tl.where(finite[:, None], means, NAN), GROUP)


@tuned(
    *("GROUP", "BITS", "OUT_BITS", "SYMMETRIC", "ROTATE", "WORLD", "STOCHASTIC", "FEEDBACK"),
    configs=SMALL_CONFIGS,
)
@triton.jit(do_not_specialize=["segments", "top", "count"])
def _requantise(
    pieces, scales, down, factor, row_bytes, residual, seed, out, out_scales, lost, bad, first,
    table, segments, top, count, out_table,
    GROUP: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROTATE: tl.constexpr,
    MIDDLE: tl.constexpr, STEP: tl.constexpr,
    ALIGNED: tl.constexpr, BYTES_ALIGNED: tl.constexpr,
    OUT_BITS: tl.constexpr, OUT_MIDDLE: tl.constexpr, OUT_STEP: tl.constexpr,
    OUT_BYTES_ALIGNED: tl.constexpr, WORLD: tl.constexpr,
    STOCHASTIC: tl.constexpr, FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // GROUP if TILE > GROUP else 1
    start, length, _, scale_at, zero_at, code_at = _tile(
        table, segments, top, count, GROUP, ROWS, BITS, ALIGNED, BYTES_ALIGNED
    )
    values = _mean(
        pieces, scales, scale_at, zero_at, code_at, length, down, factor, row_bytes,
        GROUP, ROWS, BITS, SYMMETRIC, ROTATE, MIDDLE, WORLD,
    )  # fmt: skip
    values = tl.where(tl.arange(0, GROUP)[None, :] < length[:, None], values, 0.0)
    own = tl.multiple_of(start - first, ALIGNED)
    if FEEDBACK:
        values += load_rows(residual, own, length, GROUP)
    key = 0
    if STOCHASTIC:
        key = noise.key_of(tl.load(seed))
    codes, scale, zero, decoded, failed = _encoded(
        values, start, length, key,
        GROUP, ROWS, SYMMETRIC, ROTATE, OUT_MIDDLE, OUT_STEP, STOCHASTIC,
    )  # fmt: skip
    _, _, _, scale_at, zero_at, code_at = _tile(
        out_table, segments, top, count, GROUP, ROWS, OUT_BITS, ALIGNED, OUT_BYTES_ALIGNED
    )
    _store(
        out, out_scales, scale_at, zero_at, code_at, length, codes, scale, zero,
        GROUP, ROWS, OUT_BITS, SYMMETRIC,
    )  # fmt: skip
    if FEEDBACK:
        store_rows(lost, own, length, values - decoded, GROUP)
    raised(bad, failed)
