"""Operators that send the largest elements of a bucket.

    topk_encode  flat [n] + residual [n]            -> payload, new residual [n]
    topk_decode  payloads [W, payload_bytes]        -> their mean [n]

Both are pure; numbers are fp32, payloads uint8. The last arguments of each are a `TopKLayout`'s fields:
`topk_encode(flat, residual, *layout.fields)`.

Each chunk of 65,536 elements of flat + residual sends its `quota` largest ones by magnitude (of equal ones
the first), in order, rounded to bf16, but never to infinity. Zeros aren't sent: the entries left over are
zero. The new residual is flat + residual - what was sent, exactly. Which elements are the largest is found by
a threshold guessed from a sample and one selection among the few that exceed it; the threshold decides how
long that takes, never what is sent, so nothing of it has to be kept across steps.

If anything that is encoded is NaN or infinite, the payload says so, decodes to NaN, and the new residual is
the old one.

Sources: Lin et al., ICLR 2018, "Deep gradient compression" (sampled threshold); Stich et al., NeurIPS 2018,
"Sparsified SGD with memory" (error feedback).
"""

from __future__ import annotations

import torch
from torch import Tensor

from custom_ops import checks, kernels
from custom_ops.layout import TopKLayout


@kernels.operator("topk_encode")
def topk_encode(flat: Tensor, residual: Tensor, numel: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Encode flat + residual.

    Args:
        flat: [numel] fp32, bf16 or fp16, contiguous.
        residual: [numel] fp32, contiguous.
        numel, ratio: the fields of a `TopKLayout`.

    Returns:
        [payload_bytes] uint8, and the new residual, [numel] fp32.

    Raises:
        ValueError: for a layout or tensor that does not fit.
    """
    layout = TopKLayout(numel, ratio)
    checks.vector("flat", flat, numel, checks.FLOATS)
    checks.vector("residual", residual, numel)
    return kernels.call("topk.topk_encode", flat, flat, residual, layout)


@topk_encode.register_fake
def _(flat, residual, *fields):
    layout = TopKLayout(*fields)
    checks.vector("flat", flat, layout.numel, checks.FLOATS)
    checks.vector("residual", residual, layout.numel)
    return flat.new_empty(layout.payload_bytes, dtype=torch.uint8), torch.empty_like(residual)


@kernels.operator("topk_decode")
def topk_decode(payloads: Tensor, numel: int, ratio: float) -> Tensor:
    """Decode W payloads and take their mean, summed in the order of the rows.

    Args:
        payloads: [W, payload_bytes] uint8, contiguous.
        numel, ratio: the fields of the `TopKLayout` they were encoded with.

    Returns:
        [numel] fp32, finite; but all NaN if any of the rows says that its bucket wasn't.

    Raises:
        ValueError: for a layout or tensor that does not fit.
    """
    layout = TopKLayout(numel, ratio)
    checks.rows("payloads", payloads, layout.payload_bytes)
    return kernels.call("topk.topk_decode", payloads, payloads, layout)


@topk_decode.register_fake
def _(payloads, *fields):
    layout = TopKLayout(*fields)
    checks.rows("payloads", payloads, layout.payload_bytes)
    return payloads.new_empty(layout.numel, dtype=torch.float32)
