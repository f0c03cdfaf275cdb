"""`custom_ops.wire16` in C++."""

from __future__ import annotations

import torch

from custom_ops import native
from custom_ops.layout import Layout16


def encode16(flat: torch.Tensor, layout: Layout16) -> torch.Tensor:
    payload = flat.new_empty(layout.payload_bytes, dtype=torch.uint8)
    native.call("encode16", flat.float(), payload, *_native(layout))
    return payload


def decode16(payloads: torch.Tensor, layout: Layout16) -> torch.Tensor:
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    native.call("decode16", payloads, len(payloads), out, *_native(layout))
    return out


def _native(layout: Layout16) -> tuple[int, ...]:
    brain = int(layout.dtype == "bf16")
    return layout.numel, layout.shards, layout.shard_numel, layout.piece_bytes, brain
