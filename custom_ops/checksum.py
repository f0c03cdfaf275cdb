"""Operators that find payloads damaged on the way.

    seal    payload with `pieces` pieces              -> the same with a checksum in each piece
    broken  payloads [W, bytes], each of that many    -> [W] bool, whether one of a payload's pieces is damaged

Both are pure, and serve every kind of payload. The checksum is the complement of the sum, modulo 2^32, of all
other 32-bit words of a piece; the complement makes a piece of nothing but zeros a damaged one. It finds every
single burst of up to 32 bits; of other damage it misses about one in 2^32, but an exchange of whole words
always.

Source: the internet checksum (RFC 1071), with wider words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from custom_ops import checks, kernels
from custom_ops.layout import ALIGNMENT_BYTES, CHECKSUM_WORD


@kernels.operator("seal")
def seal(payload: Tensor, pieces: int) -> Tensor:
    """A copy of the payload with a checksum in the header of each piece.

    Args:
        payload: [bytes] uint8, contiguous.
        pieces: how many of equal size it consists of.

    Raises:
        ValueError: for a tensor that is no payload of so many pieces.
    """
    words = _words(payload[None], pieces)
    return kernels.call("checksum.seal", words, words).view(torch.uint8).flatten()


@seal.register_fake
def _(payload, pieces):
    _words(payload[None], pieces)
    return torch.empty_like(payload)


@kernels.operator("broken")
def broken(payloads: Tensor, pieces: int) -> Tensor:
    """Which payloads have a piece whose checksum is not that of its content.

    Args:
        payloads: [W, bytes] uint8, contiguous; sealed.
        pieces: how many of equal size each consists of.

    Returns:
        [W] bool.

    Raises:
        ValueError: for a tensor that does not hold payloads of so many pieces.
    """
    words = _words(payloads, pieces)
    return (words[..., CHECKSUM_WORD] != kernels.call("checksum.checksums", words, words)).any(1)


@broken.register_fake
def _(payloads, pieces):
    _words(payloads, pieces)
    return payloads.new_empty(payloads.shape[0], dtype=torch.bool)


def _words(payloads: Tensor, pieces: int) -> Tensor:
    """[W, pieces, words] int32, a view."""
    if payloads.dim() != 2 or pieces < 1 or payloads.shape[1] % (pieces * ALIGNMENT_BYTES):
        raise ValueError(
            f"pieces={pieces}: payloads of shape {list(payloads.shape)} don't consist of so many pieces of "
            f"a multiple of {ALIGNMENT_BYTES} bytes each"
        )
    checks.rows("payloads", payloads, payloads.shape[1])
    return payloads.view(torch.int32).unflatten(1, (pieces, -1))
