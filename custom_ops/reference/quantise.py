"""Integers with a scale per group."""

from __future__ import annotations

import dataclasses

import torch

from custom_ops import noise
from custom_ops.layout import HADAMARD, HEADER_BYTES, Layout
from custom_ops.reference import mean

SMALLEST_SCALE = 2.0**-100


def quantise(
    flat: torch.Tensor, residual: torch.Tensor | None, seed: torch.Tensor | None, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """`custom_ops.quantise.quantise`."""
    values = flat.float() if residual is None else flat.float() + residual
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    if not values.isfinite().all():
        return payload, _kept(residual)
    decoded = encode(values, layout, places(layout), payload, seed)
    payload[:: layout.piece_bytes] = 1
    return payload, values.new_empty(0) if residual is None else values - decoded


def dequantise(payloads: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`custom_ops.quantise.dequantise`."""
    means = decode(payloads, layout, places(layout))
    finite = (payloads[:, :: layout.piece_bytes] == 1).all(0)
    shard = torch.arange(layout.numel) // max(layout.shard_numel, 1)
    return torch.where(finite[shard], means, torch.nan)


def requantise(
    pieces: torch.Tensor,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    shard: int,
    layout: Layout,
    out_layout: Layout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`custom_ops.quantise.requantise`."""
    values = decode(pieces, layout, places(layout, shard))
    if residual is not None:
        values += residual[: len(values)]
    piece = torch.zeros(out_layout.piece_bytes, dtype=torch.uint8)
    if not (pieces[:, 0] == 1).all() or not values.isfinite().all():
        return piece, _kept(residual)
    decoded = encode(values, out_layout, places(out_layout, shard), piece, seed)
    piece[0] = 1
    if residual is None:
        return piece, values.new_empty(0)
    lost = torch.zeros_like(residual)
    lost[: len(values)] = values - decoded
    return piece, lost


def _kept(residual: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0) if residual is None else residual.clone()


@dataclasses.dataclass(frozen=True)
class Places:
    """Where things stand. E elements, G groups.

    Attributes:
        position: [E], of an element in the bucket.
        group: [E], number of its group.
        byte, high: [E], where its code stands in a payload, and whether in the high half of that byte.
        scale, zero: [G], where a group's scale and zero point stand.
        blocks: [B, 32], numbers of elements that are rotated together.
    """

    position: torch.Tensor
    group: torch.Tensor
    byte: torch.Tensor
    high: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    blocks: torch.Tensor


def places(layout: Layout, shard: int | None = None) -> Places:
    """Of a whole payload, or of one shard's piece."""
    parts: list[tuple[torch.Tensor, ...]] = []
    elements = groups = 0
    for segment in layout.segments:
        if shard is not None and segment.shard != shard:
            continue
        piece = segment.shard * layout.piece_bytes if shard is None else 0
        index = torch.arange(segment.length)
        group, within = index // layout.group, index % layout.group
        length = (segment.length - group * layout.group).clamp(max=layout.group)
        half = (length + 1) // 2 if layout.bits == 4 else length
        high = within >= half
        code = segment.code + group * (-(-layout.group * layout.bits // 8))
        number = segment.group + torch.arange(-(-segment.length // layout.group))
        first = index[(within % HADAMARD == 0) & (within + HADAMARD <= length)]
        parts.append(
            (
                segment.start + index,
                groups + group,
                piece + layout.codes_offset + code + torch.where(high, within - half, within),
                high,
                piece + HEADER_BYTES + 2 * number,
                piece + layout.zeros_offset + number,
                elements + first[:, None] + torch.arange(HADAMARD),
            )
        )
        elements, groups = elements + segment.length, groups + len(number)
    none = torch.arange(0)
    empty = (none, none, none, none.bool(), none, none, none.reshape(0, HADAMARD))
    return Places(*map(torch.cat, zip(*(parts or [empty]), strict=True)))


def encode(
    values: torch.Tensor,
    layout: Layout,
    where: Places,
    payload: torch.Tensor,
    seed: torch.Tensor | None,
) -> torch.Tensor:
    """Write a payload (or piece) but for its headers; returns what it decodes to.

    Args:
        values: [E], finite.
        payload: zeros.
        seed: for stochastic rounding; None rounds to nearest.
    """
    if layout.rotate:
        values = values.clone()
        values[where.blocks] = transform(values[where.blocks] / HADAMARD)
    scale, zero = grid(values, layout, where)
    points = rounded(values * (1 / scale)[where.group], where.position, seed)
    codes = (points + zero[where.group]).to(torch.uint8)

    payload[where.byte[~where.high]] = codes[~where.high]
    payload[where.byte[where.high]] |= codes[where.high] << 4
    scale_bits = scale.view(torch.int32) >> 16
    payload[where.scale] = scale_bits.to(torch.uint8)
    payload[where.scale + 1] = (scale_bits >> 8).to(torch.uint8)
    if not layout.symmetric:
        payload[where.zero] = zero.to(torch.uint8)
    return mean.finish(_unrotated(points * (scale / 2)[where.group], layout, where), 1)


def grid(values: torch.Tensor, layout: Layout, where: Places) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of each group, [G] in fp32; a scale is a bf16 number, rounded up."""
    nothing = torch.zeros(len(where.scale))
    high = nothing.scatter_reduce(0, where.group, values, "amax")
    low = nothing.scatter_reduce(0, where.group, values, "amin")
    if layout.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    # A bit more than levels - 1, so that no two rounded ends lie further apart than there are codes.
    step = (1 + 2.0**-16) / (2**layout.bits - 2)
    exact = (high * step - low * step).clamp(min=SMALLEST_SCALE)
    scale = ((exact.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    if layout.symmetric:
        return scale, torch.full_like(scale, middle(layout))
    return scale, (-low * (1 / scale)).ceil()


def middle(layout: Layout) -> int:
    """The zero point of symmetric codes."""
    return 2 ** (layout.bits - 1) - 1


def rounded(
    scaled: torch.Tensor, position: torch.Tensor, seed: torch.Tensor | None
) -> torch.Tensor:
    """Whole numbers: the nearest (even at ties), or one of the neighbours, by chance and right on average."""
    if seed is None:
        return scaled.round()
    key = noise.key_of(int(seed))
    below = scaled.floor()
    return below + (noise.uniform(key, position) < scaled - below)


def decode(payloads: torch.Tensor, layout: Layout, where: Places) -> torch.Tensor:
    """Mean of W payloads (or pieces) [W, bytes] as [E], flags not looked at."""
    rows = payloads.shape[0]
    shares = []
    for payload in payloads:
        codes = torch.where(where.high, payload[where.byte] >> 4, payload[where.byte])
        codes = codes & (2**layout.bits - 1)
        low, high = payload[where.scale].int(), payload[where.scale + 1].int()
        scale = (low << 16 | high << 24).view(torch.float32) * mean.down(rows)
        zero = (
            torch.full_like(scale, middle(layout))
            if layout.symmetric
            else payload[where.zero].float()
        )
        shares.append((codes.float() - zero[where.group]) * scale[where.group])
    return mean.finish(_unrotated(mean.in_order(shares), layout, where), rows)


def transform(blocks: torch.Tensor) -> torch.Tensor:
    """Walsh-Hadamard transform of each row of 32, without a scale; applied twice it multiplies by 32."""
    for _ in range(HADAMARD.bit_length() - 1):
        even, odd = blocks[:, 0::2], blocks[:, 1::2]
        blocks = torch.cat([even + odd, even - odd], dim=1)
    return blocks


def _unrotated(values: torch.Tensor, layout: Layout, where: Places) -> torch.Tensor:
    if layout.rotate:
        values[where.blocks] = transform(values[where.blocks])
    return values
