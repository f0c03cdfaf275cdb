"""`custom_ops.quantise` in CUDA C++."""

from __future__ import annotations

import torch

from custom_ops import outputs
from custom_ops.cuda.driver import THREADS, blocks_for, finish, flat_kind, launch
from custom_ops.groups import Groups, groups_of
from custom_ops.layout import Layout
from custom_ops.reference import mean


def quantise(
    flat: torch.Tensor, residual: torch.Tensor | None, seed: torch.Tensor | None, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = groups_of(layout, None, flat.device)
    payload, lost = outputs.payload_and_residual(layout.payload_bytes, residual, flat)
    bad = flat.new_zeros(1, dtype=torch.int32)
    constants = _constants(layout, layout, groups, seed) | flat_kind(flat)
    launch(
        "quantise.quantise",
        _blocks(groups),
        *(flat, residual, seed, payload, lost, bad),
        *(groups.table, groups.segments, groups.count),
        constants=constants,
    )
    finish("quantise", constants, payload, residual, lost, bad, groups.gaps, layout.numel)
    return payload, lost


def dequantise(payloads: torch.Tensor, layout: Layout) -> torch.Tensor:
    groups = groups_of(layout, None, payloads.device)
    out = payloads.new_empty(layout.numel, dtype=torch.float32)
    launch(
        "quantise.dequantise",
        _blocks(groups),
        *(payloads, layout.payload_bytes, out, *mean.factors(len(payloads))),
        *(groups.table, groups.segments, groups.count),
        constants=_constants(layout, layout, groups, None, len(payloads)),
    )
    return out


def requantise(
    pieces: torch.Tensor,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    shard: int,
    layout: Layout,
    out_layout: Layout,
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = groups_of(layout, shard, pieces.device)
    out_groups = groups_of(out_layout, shard, pieces.device)
    piece, lost = outputs.payload_and_residual(out_layout.piece_bytes, residual, pieces)
    bad = pieces.new_zeros(1, dtype=torch.int32)
    first = shard * layout.shard_numel
    constants = _constants(layout, out_layout, groups, seed, len(pieces))
    launch(
        "quantise.requantise",
        _blocks(groups),
        *(pieces, layout.piece_bytes, residual, seed, piece, lost, bad, first),
        *(*mean.factors(len(pieces)), groups.table, out_groups.table),
        *(groups.segments, groups.count),
        constants=constants,
    )
    held = layout.held_by(shard)
    finish("quantise", constants, piece, residual, lost, bad, out_groups.gaps, held, pieces)
    return piece, lost


def _blocks(groups: Groups) -> tuple[int, int]:
    return blocks_for(groups.count, THREADS // 32)


def _constants(
    layout: Layout, out: Layout, groups: Groups, seed: torch.Tensor | None, world: int = 1
) -> dict[str, int]:
    step = torch.tensor((1 + 2.0**-16) / (2**out.bits - 2), dtype=torch.float32, device="cpu")
    return {
        "GROUP": groups.size,
        "BITS": layout.bits,
        "OUT_BITS": out.bits,
        "SYMMETRIC": layout.symmetric,
        "ROTATE": layout.rotate,
        "STOCHASTIC": seed is not None,
        "WORLD": world,
        "STEP": int(step.view(torch.int32)),
        "FLAT": 0,
    }
