"""`custom_ops.wire16` in CUDA C++."""

from __future__ import annotations

import torch

from custom_ops.cuda.driver import THREADS, flat_kind, launch, processors
from custom_ops.layout import Layout16
from custom_ops.reference import mean

_BLOCKS_PER_PROCESSOR = 8


def encode16(flat: torch.Tensor, layout: Layout16) -> torch.Tensor:
    payload = flat.new_empty(layout.payload_bytes, dtype=torch.uint8)
    largest = flat.new_zeros(layout.shards, dtype=torch.int32)
    constants = {"BRAIN": layout.dtype == "bf16", "WORLD": 1, **flat_kind(flat)}
    most = _BLOCKS_PER_PROCESSOR * processors(flat.device)
    launch(
        "wire16.largest_of",
        (min(_blocks(layout.shard_numel), most), layout.shards),
        *(flat, largest, layout.numel, layout.shard_numel),
        constants=constants,
    )
    launch(
        "wire16.encode",
        (_blocks(layout.piece_bytes // 2), layout.shards),
        *(flat, payload, largest, layout.numel, layout.shards, layout.shard_numel),
        layout.piece_bytes,
        constants=constants,
    )
    return payload


def decode16(payloads: torch.Tensor, layout: Layout16) -> torch.Tensor:
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    launch(
        "wire16.decode",
        (_blocks(layout.shard_numel), layout.shards),
        *(payloads, layout.payload_bytes, out, *mean.factors(len(payloads))),
        *(layout.numel, layout.shard_numel, layout.piece_bytes),
        constants={"BRAIN": layout.dtype == "bf16", "WORLD": len(payloads), "FLAT": 0},
    )
    return out


def _blocks(values: int) -> int:
    return -(-values // (4 * THREADS))
