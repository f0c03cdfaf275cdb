"""Operators that turn a bucket of gradients into integers with a scale per group, and back.

    quantise    flat [n] + residual [n]                        -> payload, new residual [n]
    dequantise  payloads [W, payload_bytes]                    -> their mean [n]
    requantise  pieces [W, piece_bytes] of one shard, residual -> piece of their mean, new residual

All are pure; numbers are fp32, payloads uint8. Without a residual the new one is empty. The last arguments of
each are a `Layout`'s fields: `quantise(flat, None, None, *layout.fields)`.

The scale s of a group of values v is (max v - min v) / (2^bits - 2), zero always in that range, times
1 + 2^-16, rounded up to a bf16 number, and at least 2^-100. The zero point z is a whole number; for symmetric
codes it is the middle one, and max v = -min v = max |v|. A value's code is round(v / s) + z, which needs no
clamp, and it decodes to (code - z) s. That product is exact in fp32, so nothing differs where it is
contracted with an addition; and no step of the codec is subnormal, so nothing differs where subnormals are
flushed to zero.

Rounding to nearest, for all finite v (not rotated):
    |decoded - v| <= s/2 (1 + 2^-14), and so for a group's largest and smallest value;
    v <= w in one group  =>  decoded v <= decoded w;
    new residual = v - decoded, rounded once, and exact but where |v| is just below s/2.
With a seed rounding is stochastic: the error is at most s, to the same slack, and zero on average. With
rotation an error is that of a sum of 32: at most 16 s, and about sqrt(32 / 12) s as a root mean square,
whatever the outliers were.

If anything that is encoded is NaN or infinite, the payload says so in each piece and decodes to NaN, and the
new residual is the old one.

Sources: affine quantisation with a zero point after Jacob et al., CVPR 2018, "Quantization and training of
neural networks for efficient integer-arithmetic-only inference"; stochastic rounding after Alistarh et al.,
NeurIPS 2017, "QSGD"; error feedback after Seide et al., Interspeech 2014, "1-bit stochastic gradient
descent", at the owner of a shard too after Tang et al., ICML 2021, "1-bit Adam"; rotation after Suresh et
al., ICML 2017, "Distributed mean estimation with limited communication".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from custom_ops import checks, kernels, outputs
from custom_ops.layout import Layout


@kernels.operator("quantise")
def quantise(
    flat: Tensor,
    residual: Tensor | None,
    seed: Tensor | None,
    lengths: Sequence[int],
    shards: int,
    bits: int,
    group: int,
    symmetric: bool,
    rotate: bool,
) -> tuple[Tensor, Tensor]:
    """Encode flat + residual.

    Args:
        flat: [n] fp32, bf16 or fp16, contiguous; n is the sum of `lengths`.
        residual: [n] fp32, contiguous, or None.
        seed: one int64 for stochastic rounding; None rounds to nearest. The caller sees to it that ranks,
            steps and buckets have seeds of their own.
        lengths, shards, bits, group, symmetric, rotate: the fields of a `Layout`.

    Returns:
        [payload_bytes] uint8, and the new residual: flat + residual minus what the payload decodes to, [n]
        fp32.

    Raises:
        ValueError: for a layout or tensor that does not fit.
    """
    layout = layout_of(lengths, shards, bits, group, symmetric, rotate)
    _check_input(flat, residual, seed, layout.numel)
    return kernels.call("quantise.quantise", flat, flat, residual, seed, layout)


@quantise.register_fake
def _(flat, residual, seed, *fields):
    layout = layout_of(*fields)
    _check_input(flat, residual, seed, layout.numel)
    return outputs.payload_and_residual(layout.payload_bytes, residual, flat)


@kernels.operator("dequantise")
def dequantise(
    payloads: Tensor,
    lengths: Sequence[int],
    shards: int,
    bits: int,
    group: int,
    symmetric: bool,
    rotate: bool,
) -> Tensor:
    """Decode W payloads and take their mean, summed in the order of the rows.

    Args:
        payloads: [W, payload_bytes] uint8, contiguous.
        lengths, shards, bits, group, symmetric, rotate: the fields of the `Layout` they were encoded with.

    Returns:
        [n] fp32, finite; but NaN in each shard whose piece in any of the rows says that its bucket wasn't.

    Raises:
        ValueError: for a layout or tensor that does not fit.
    """
    layout = layout_of(lengths, shards, bits, group, symmetric, rotate)
    checks.rows("payloads", payloads, layout.payload_bytes)
    return kernels.call("quantise.dequantise", payloads, payloads, layout)


@dequantise.register_fake
def _(payloads, *fields):
    layout = layout_of(*fields)
    checks.rows("payloads", payloads, layout.payload_bytes)
    return payloads.new_empty(layout.numel, dtype=torch.float32)


@kernels.operator("requantise")
def requantise(
    pieces: Tensor,
    residual: Tensor | None,
    seed: Tensor | None,
    shard: int,
    out_bits: int,
    lengths: Sequence[int],
    shards: int,
    bits: int,
    group: int,
    symmetric: bool,
    rotate: bool,
) -> tuple[Tensor, Tensor]:
    """Encode the mean of W pieces + the owner's residual, without writing that mean to memory.

    Args:
        pieces: [W, piece_bytes] uint8, contiguous: piece `shard` of W payloads.
        residual: [shard_numel] fp32, contiguous, or None.
        seed: as for `quantise`, but not the same.
        shard: which one.
        out_bits: of the new codes.
        lengths, shards, bits, group, symmetric, rotate: the fields of the `Layout` the payloads were encoded
            with.

    Returns:
        [piece_bytes] uint8 of the layout with `out_bits`, and the new residual, zero beyond the end of the
        bucket. The pieces of all shards in a row are a payload of that layout.

    Raises:
        ValueError: for a layout or tensor that does not fit.
    """
    layout = layout_of(lengths, shards, bits, group, symmetric, rotate)
    out_layout = layout_of(lengths, shards, out_bits, group, symmetric, rotate)
    _check_pieces(pieces, residual, seed, shard, layout)
    operands = (pieces, residual, seed, shard, layout, out_layout)
    return kernels.call("quantise.requantise", pieces, *operands)


@requantise.register_fake
def _(pieces, residual, seed, shard, out_bits, *fields):
    layout = layout_of(*fields)
    _check_pieces(pieces, residual, seed, shard, layout)
    out_layout = dataclasses.replace(layout, bits=out_bits)
    return outputs.payload_and_residual(out_layout.piece_bytes, residual, pieces)


def layout_of(lengths: Sequence[int], *rest: int) -> Layout:
    """The layout with these fields, the same object each time."""
    return _layout_of(tuple(lengths), *rest)


@functools.lru_cache(maxsize=1024)
def _layout_of(*fields) -> Layout:  # type: ignore[no-untyped-def]
    return Layout(*fields)


def _check_input(flat: Tensor, residual: Tensor | None, seed: Tensor | None, numel: int) -> None:
    checks.vector("flat", flat, numel, checks.FLOATS)
    checks.vector("residual", residual, numel)
    checks.seed(seed)


def _check_pieces(
    pieces: Tensor, residual: Tensor | None, seed: Tensor | None, shard: int, layout: Layout
) -> None:
    checks.rows("pieces", pieces, layout.piece_bytes)
    checks.vector("residual", residual, layout.shard_numel)
    checks.seed(seed)
    if not 0 <= shard < layout.shards:
        raise ValueError(f"shard={shard}: expected one of the layout's {layout.shards}, from 0")
