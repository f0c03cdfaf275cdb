"""16-bit floats with a power-of-two scale."""

from __future__ import annotations

import math

import torch

from custom_ops.layout import HEADER_BYTES, Layout16
from custom_ops.reference import mean

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = 65504.0  # of fp16
LARGEST_EXPONENT = 100  # of a scale, so that no product of scales is subnormal


def encode16(flat: torch.Tensor, layout: Layout16) -> torch.Tensor:
    """`custom_ops.wire16.encode16`."""
    pieces = torch.zeros(layout.shards, layout.piece_bytes, dtype=torch.uint8)
    flat = flat.float()
    if flat.isfinite().all():
        for piece, values in zip(pieces, _shards(flat, layout), strict=True):
            exponent = exponent_for(values.abs().max().item() if len(values) else 0.0)
            narrow = (values * 2.0**exponent).to(DTYPES[layout.dtype])
            piece[0], piece[1] = 1, exponent & 0xFF
            piece[HEADER_BYTES : HEADER_BYTES + 2 * len(values)] = narrow.view(torch.uint8)
    return pieces.flatten()


def decode16(payloads: torch.Tensor, layout: Layout16) -> torch.Tensor:
    """`custom_ops.wire16.decode16`."""
    rows = payloads.shape[0]
    pieces = payloads.view(rows, layout.shards, layout.piece_bytes)
    shares = []
    for row in pieces:
        values = row[:, HEADER_BYTES : HEADER_BYTES + 2 * layout.shard_numel].contiguous()
        scale = torch.exp2(-row[:, 1].view(torch.int8).float()) * mean.down(rows)
        shares.append(values.view(DTYPES[layout.dtype]).float() * scale[:, None])
    finite = (pieces[:, :, 0] == 1).all(0)
    means = torch.where(finite[:, None], mean.finish(mean.in_order(shares), rows), torch.nan)
    return means.flatten()[: layout.numel].clone()


def exponent_for(largest: float) -> int:
    """The largest exponent, up to a limit, with which values up to this one stay within fp16."""
    if largest == 0:
        return LARGEST_EXPONENT
    exponent = math.floor(math.log2(LARGEST)) - math.frexp(largest)[1] + 1
    if math.ldexp(largest, exponent) > LARGEST:
        exponent -= 1
    return min(exponent, LARGEST_EXPONENT)


def _shards(flat: torch.Tensor, layout: Layout16) -> list[torch.Tensor]:
    starts = range(0, layout.shards * layout.shard_numel, layout.shard_numel or 1)
    found = [flat[start : start + layout.shard_numel] for start in starts]
    return found or [flat] * layout.shards
