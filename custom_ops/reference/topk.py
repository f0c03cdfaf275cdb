"""The largest elements of each chunk."""

from __future__ import annotations

import torch

from custom_ops.layout import CHUNK, HEADER_BYTES, TopKLayout

LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def topk_encode(
    flat: torch.Tensor, residual: torch.Tensor, layout: TopKLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """`custom_ops.topk.topk_encode`."""
    kept = flat.float() + residual
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    if not kept.isfinite().all():
        return payload, residual.clone()
    payload[0] = 1
    values, offsets = _entries(payload, layout)
    for chunk in range(layout.chunks):
        part = kept[chunk * CHUNK : (chunk + 1) * CHUNK]
        # Stable: of equal ones the first come first.
        order = part.abs().argsort(descending=True, stable=True)[: layout.quota(chunk)]
        where = order[part[order] != 0].sort().values
        sent = part[where].bfloat16().clamp(-LARGEST_BF16, LARGEST_BF16)
        entries = slice(chunk * layout.quota(0), chunk * layout.quota(0) + len(where))
        values[entries], offsets[entries] = sent, where.to(torch.int16)
        part[where] -= sent.float()
    return payload, kept


def topk_decode(payloads: torch.Tensor, layout: TopKLayout) -> torch.Tensor:
    """`custom_ops.topk.topk_decode`."""
    if not (payloads[:, 0] == 1).all():
        return torch.full((layout.numel,), torch.nan)
    sums = torch.zeros(layout.numel)
    share = torch.tensor(1.0) / payloads.shape[0]
    for payload in payloads:
        values, offsets = _entries(payload, layout)
        for chunk in range(layout.chunks):
            entries = slice(chunk * layout.quota(0), chunk * layout.quota(0) + layout.quota(chunk))
            where = offsets[entries].int() & 0xFFFF
            inside = where < layout.chunk_numel(chunk)  # always, unless the payload is damaged
            part = sums[chunk * CHUNK : (chunk + 1) * CHUNK]
            part.index_add_(0, where[inside], values[entries][inside].float() * share)
    return sums


def _entries(payload: torch.Tensor, layout: TopKLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and offsets, as views."""
    values = payload[HEADER_BYTES : layout.offsets_offset].view(torch.bfloat16)
    offsets = payload[layout.offsets_offset : layout.offsets_offset + 2 * layout.entries]
    return values, offsets.view(torch.int16)
