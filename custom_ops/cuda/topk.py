"""`custom_ops.topk` in CUDA C++."""

from __future__ import annotations

import torch

from custom_ops.cuda.driver import THREADS, finish, flat_kind, launch, processors
from custom_ops.groups import gap_behind
from custom_ops.layout import CHUNK, TopKLayout

ENCODE_THREADS = 512
_BLOCKS_PER_PROCESSOR = 3


def topk_encode(
    flat: torch.Tensor, residual: torch.Tensor, layout: TopKLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    payload = flat.new_empty(layout.payload_bytes, dtype=torch.uint8)
    kept = torch.empty_like(residual)
    bad = flat.new_zeros(1, dtype=torch.int32)
    constants = {"THREADS": ENCODE_THREADS, "WORLD": 1, **flat_kind(flat)}
    blocks = min(layout.chunks, _BLOCKS_PER_PROCESSOR * processors(flat.device))
    found = flat.new_empty(blocks * CHUNK, dtype=torch.int16)
    launch(
        "topk.encode",
        (blocks, 1),
        *(flat, residual, kept, payload, found, bad, layout.numel, *_quotas(layout)),
        *(layout.offsets_offset // 2, layout.chunks),
        constants=constants,
        threads=ENCODE_THREADS,
    )
    gaps = gap_behind(layout.offsets_offset + 2 * layout.entries, layout.payload_bytes, flat.device)
    finish("topk", constants, payload, residual, kept, bad, gaps, layout.numel)
    return payload, kept


def topk_decode(payloads: torch.Tensor, layout: TopKLayout) -> torch.Tensor:
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    share = (torch.tensor(1.0, device="cpu") / len(payloads)).item()
    launch(
        "topk.decode",
        (layout.chunks, 1),
        *(payloads, layout.payload_bytes, out, share, layout.numel, *_quotas(layout)),
        *(layout.offsets_offset // 2, layout.chunks),
        constants={"THREADS": THREADS, "WORLD": len(payloads), "FLAT": 0},
    )
    return out


def _quotas(layout: TopKLayout) -> tuple[int, int]:
    return (layout.quota(0), layout.quota(layout.chunks - 1)) if layout.chunks else (0, 0)
