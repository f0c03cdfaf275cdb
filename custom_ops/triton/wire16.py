"""`custom_ops.wire16` in Triton. The scale of a shard has to be known before its first value is encoded, so
encoding reads the bucket twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.layout import HEADER_BYTES, Layout16
from custom_ops.reference import mean
from custom_ops.reference.wire16 import LARGEST_EXPONENT
from custom_ops.triton.common import (
    INFINITY,
    MAGNITUDE,
    NAN,
    OPTIONS,
    bits_of,
    clamped,
    float_of,
    to_brain,
    tuned,
)

_HEADER = tl.constexpr(HEADER_BYTES // 2)  # in values of 16 bits
_LARGEST_EXPONENT = tl.constexpr(LARGEST_EXPONENT)
_LIMIT = tl.constexpr(0x477FE000)  # 65504, the largest fp16


def encode16(flat: torch.Tensor, layout: Layout16) -> torch.Tensor:
    payload = flat.new_empty(layout.payload_bytes, dtype=torch.uint8)
    largest = flat.new_zeros(layout.shards, dtype=torch.int32)
    if layout.numel:
        _largest[lambda meta: (triton.cdiv(layout.shard_numel, meta["TILE"]), layout.shards)](
            flat, largest, layout.numel, layout.shard_numel, **OPTIONS
        )
    values = layout.piece_bytes // 2
    _encode[lambda meta: (triton.cdiv(values, meta["TILE"]), layout.shards)](
        *(flat, payload.view(torch.int16), largest, layout.numel, layout.shards),
        *(layout.shard_numel, values, layout.dtype == "bf16"),
        **OPTIONS,
    )
    return payload


def decode16(payloads: torch.Tensor, layout: Layout16) -> torch.Tensor:
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    rows = payloads.shape[0]
    if layout.numel:
        _decode[lambda meta: (triton.cdiv(layout.shard_numel, meta["TILE"]), layout.shards)](
            *(payloads, payloads.view(torch.int16), out, *mean.factors(rows)),
            *(layout.numel, layout.shard_numel, layout.piece_bytes, layout.payload_bytes),
            *(layout.dtype == "bf16", rows),
            **OPTIONS,
        )
    return out


@tuned()
@triton.jit
def _largest(flat, largest, numel, shard_numel, TILE: tl.constexpr):
    shard = tl.program_id(1).to(tl.int64)
    within = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = shard * shard_numel + within
    values = tl.load(flat + at, mask=(within < shard_numel) & (at < numel), other=0.0)
    tl.atomic_max(largest + shard, tl.max(bits_of(values.to(tl.float32)) & MAGNITUDE))


@triton.jit
def _exponent_for(largest):
    """The largest exponent, up to a limit, with which values up to this one (its bits) stay within fp16."""
    beyond = ((largest & 0x7FFFFF) > (_LIMIT & 0x7FFFFF)).to(tl.int32)
    return tl.minimum((_LIMIT >> 23) - (largest >> 23) - beyond, _LARGEST_EXPONENT)


@tuned("BRAIN")
@triton.jit
def _encode(
    flat, payload, largest, numel, shards, shard_numel, values, BRAIN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A piece is `values` 16-bit words: header, then the shard's values, then zeros."""
    shard = tl.program_id(1).to(tl.int64)
    of_all = tl.load(largest)
    other = shard * 0 + 1
    while other < shards:
        of_all = tl.maximum(of_all, tl.load(largest + other))
        other += 1
    finite = of_all < INFINITY
    exponent = _exponent_for(tl.load(largest + shard))
    word = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    within = word - _HEADER
    at = shard * shard_numel + within
    held = tl.where(finite, numel, 0)
    exists = (within >= 0) & (within < shard_numel) & (at < held)
    x = tl.load(flat + at, mask=exists, other=0.0).to(tl.float32)
    scaled = x * float_of((127 + exponent) << 23)
    if BRAIN:
        narrow = to_brain(bits_of(scaled))
    else:
        narrow = scaled.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    header = tl.where(finite & (word == 0), 1 | ((exponent & 0xFF) << 8), 0)
    narrow = tl.where(exists, narrow, header)
    tl.store(payload + shard * values + word, narrow.to(tl.int16), mask=word < values)


@tuned("BRAIN", "WORLD")
@triton.jit
def _decode(
    payloads, values, out, down, factor, numel, shard_numel, piece_bytes, row_bytes,
    BRAIN: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    shard = tl.program_id(1).to(tl.int64)
    within = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = shard * shard_numel + within
    exists = (within < shard_numel) & (at < numel)
    piece = shard * piece_bytes
    sums = _share(payloads, values, piece, within, exists, down, BRAIN)
    finite = tl.load(payloads + piece) == 1
    for row in range(1, WORLD):
        piece = row * row_bytes.to(tl.int64) + shard * piece_bytes
        sums += _share(payloads, values, piece, within, exists, down, BRAIN)
        finite = finite & (tl.load(payloads + piece) == 1)
    tl.store(out + at, tl.where(finite, clamped(sums * factor), NAN), mask=exists)


@triton.jit
def _share(payloads, values, piece, within, exists, down, BRAIN: tl.constexpr):
    """What one piece decodes to, times `down`."""
    exponent = tl.load(payloads + piece + 1).to(tl.int8, bitcast=True).to(tl.int32)
    scale = float_of((127 - exponent) << 23) * down
    narrow = tl.load(values + piece // 2 + _HEADER + within, mask=exists, other=0)
    if BRAIN:
        wide = float_of(narrow.to(tl.int32) << 16)
    else:
        wide = narrow.to(tl.float16, bitcast=True).to(tl.float32)
    return wide * scale
