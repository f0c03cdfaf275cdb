"""`custom_ops.quantise` in C++."""

from __future__ import annotations

import ctypes
import functools

import torch

from custom_ops import native, noise, outputs
from custom_ops.layout import Layout, Segment

FIELDS = (
    *("bits", "group", "symmetric", "rotate", "shards"),
    *("piece_bytes", "zeros_offset", "codes_offset"),
)


class NativeLayout(ctypes.Structure):
    """What the kernels know of a layout."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


class NativeSegment(ctypes.Structure):
    """A `Segment`, for the kernels."""

    _fields_ = [(name, ctypes.c_int64) for name in Segment._fields]


def quantise(
    flat: torch.Tensor, residual: torch.Tensor | None, seed: torch.Tensor | None, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    flat = flat.float()
    payload, lost = outputs.payload_and_residual(layout.payload_bytes, residual, flat)
    segments, native_layout = _native(layout, None)
    native.call(
        *("quantise", flat, residual, None if residual is None else lost, payload),
        *(segments, len(segments), native_layout, layout.numel, *_rounding(seed)),
    )
    return payload, lost


def dequantise(payloads: torch.Tensor, layout: Layout) -> torch.Tensor:
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    segments, native_layout = _native(layout, None)
    native.call("dequantise", payloads, len(payloads), out, segments, len(segments), native_layout)
    return out


def requantise(
    pieces: torch.Tensor,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    shard: int,
    layout: Layout,
    out_layout: Layout,
) -> tuple[torch.Tensor, torch.Tensor]:
    piece, lost = outputs.payload_and_residual(out_layout.piece_bytes, residual, pieces)
    segments, native_layout = _native(layout, shard)
    out_segments, native_out_layout = _native(out_layout, shard)
    native.call(
        *("requantise", pieces, len(pieces), residual, None if residual is None else lost, piece),
        *(shard, shard * layout.shard_numel, layout.shard_numel, segments, out_segments),
        *(len(segments), native_layout, native_out_layout, *_rounding(seed)),
    )
    return piece, lost


@functools.lru_cache(maxsize=1024)
def _native(layout: Layout, shard: int | None) -> tuple[ctypes.Array, NativeLayout]:
    """Segments, of one shard or all, and layout as the kernels read them."""
    segments = [NativeSegment(*s) for s in layout.segments if shard in (None, s.shard)]
    fields = (int(getattr(layout, name)) for name in FIELDS)
    return (NativeSegment * len(segments))(*segments), NativeLayout(*fields)


def _rounding(seed: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if seed is None else (1, noise.key_of(int(seed)))
