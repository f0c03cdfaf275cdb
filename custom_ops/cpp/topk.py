"""`custom_ops.topk` in C++."""

from __future__ import annotations

import ctypes

import torch

from custom_ops import native
from custom_ops.layout import TopKLayout


class NativeLayout(ctypes.Structure):
    """What the kernels know of a layout."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("numel", "chunks", "quota", "last_quota", "offsets_offset", "payload_bytes")
    ]


def topk_encode(
    flat: torch.Tensor, residual: torch.Tensor, layout: TopKLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    payload = flat.new_empty(layout.payload_bytes, dtype=torch.uint8)
    kept = torch.empty_like(residual)
    native.call("topk_encode", flat.float(), residual, kept, payload, _native(layout))
    return payload, kept


def topk_decode(payloads: torch.Tensor, layout: TopKLayout) -> torch.Tensor:
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    native.call("topk_decode", payloads, len(payloads), out, _native(layout))
    return out


def _native(layout: TopKLayout) -> NativeLayout:
    quotas = (layout.quota(0), layout.quota(layout.chunks - 1)) if layout.chunks else (0, 0)
    sizes = (layout.offsets_offset, layout.payload_bytes)
    return NativeLayout(layout.numel, layout.chunks, *quotas, *sizes)
