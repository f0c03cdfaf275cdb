"""Operators that send a bucket in 16 bits, with a power-of-two scale for each shard.

    encode16  flat [n]                     -> payload
    decode16  payloads [W, payload_bytes]  -> their mean [n] fp32

Both are pure. The last arguments of each are a `Layout16`'s fields: `encode16(flat, *layout.fields)`. A piece
of a payload is the payload of a bucket of `shard_numel` elements, so the mean of a shard's pieces is encoded
again with `encode16(decode16(pieces, shard_numel, 1, dtype), shard_numel, 1, dtype)`.

The scale is 2^e with the largest e <= 100 that keeps all of the shard within fp16's largest number, 65504
(for bf16 too, which then can't round to infinity either). Means are taken in fp32. So nothing overflows,
neither on the wire nor in a sum, and with the largest value M of a shard, for M >= 2^-84:
    fp16: |decoded - v| <= max(2^-11 |v|, 2^-39 M); a value from 2^-24 on is exact wherever it was in fp16, if
        M <= 65504;
    bf16: |decoded - v| <= 2^-8 |v| for |v| >= 2^-100 M and 2^-126.

If anything that is encoded is NaN or infinite, the payload says so in each piece and decodes to NaN.

Source: loss scaling after Micikevicius et al., ICLR 2018, "Mixed precision training", applied to each payload.
"""

from __future__ import annotations

import torch
from torch import Tensor

from custom_ops import checks, kernels
from custom_ops.layout import Layout16


@kernels.operator("encode16")
def encode16(flat: Tensor, numel: int, shards: int, dtype: str) -> Tensor:
    """Encode a bucket.

    Args:
        flat: [numel] fp32, bf16 or fp16, contiguous.
        numel, shards, dtype: the fields of a `Layout16`.

    Returns:
        [payload_bytes] uint8.

    Raises:
        ValueError: for a layout or tensor that does not fit.
    """
    layout = Layout16(numel, shards, dtype)
    checks.vector("flat", flat, numel, checks.FLOATS)
    return kernels.call("wire16.encode16", flat, flat, layout)


@encode16.register_fake
def _(flat, *fields):
    layout = Layout16(*fields)
    checks.vector("flat", flat, layout.numel, checks.FLOATS)
    return flat.new_empty(layout.payload_bytes, dtype=torch.uint8)


@kernels.operator("decode16")
def decode16(payloads: Tensor, numel: int, shards: int, dtype: str) -> Tensor:
    """Decode W payloads and take their mean, summed in the order of the rows.

    Args:
        payloads: [W, payload_bytes] uint8, contiguous.
        numel, shards, dtype: the fields of the `Layout16` they were encoded with.

    Returns:
        [numel] fp32, finite; but NaN in each shard whose piece in any of the rows says that its bucket wasn't.

    Raises:
        ValueError: for a layout or tensor that does not fit.
    """
    layout = Layout16(numel, shards, dtype)
    checks.rows("payloads", payloads, layout.payload_bytes)
    return kernels.call("wire16.decode16", payloads, payloads, layout)


@decode16.register_fake
def _(payloads, *fields):
    layout = Layout16(*fields)
    checks.rows("payloads", payloads, layout.payload_bytes)
    return payloads.new_empty(layout.numel, dtype=torch.float32)
