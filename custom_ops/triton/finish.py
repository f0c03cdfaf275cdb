"""The last step of what encodes: headers, and zeros where nothing stands; or, if anything was not finite,
nothing but zeros, and the residual as it was."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = tl.constexpr(1024)  # of 8 bytes, or elements: what a program writes at a time
_PROGRAMS = 512  # at most


def finish(
    payload: torch.Tensor,
    residual: torch.Tensor | None,
    lost: torch.Tensor,
    bad: torch.Tensor,
    gaps: torch.Tensor,
    held: int,
    pieces: torch.Tensor | None = None,
) -> None:
    """Complete a payload. Reads one number, unless there is much to be taken back.

    Args:
        payload: [pieces * bytes] uint8, each piece a multiple of 8 bytes.
        residual, lost: old and new one; None for no residual.
        bad: [1] int32, not 0 if something was not finite.
        gaps: [2, gaps, pieces] int64: from where to where there is nothing, in bytes of a piece.
        held: elements of `lost` that are written; the others become zero.
        pieces: [W, bytes] uint8, what was decoded before: all must say that they are finite.
    """
    rows, row_bytes = (0, 0) if pieces is None else (pieces.shape[0], pieces.shape[1])
    decoded = payload if pieces is None else pieces
    work = max(payload.nbytes // 8, lost.numel())
    _finish[(min(_PROGRAMS, 1 + work // _WORDS.value),)](
        *(payload, payload.view(torch.int64), residual, lost, bad, decoded, rows, row_bytes),
        *(gaps, gaps.shape[1], gaps.shape[2], payload.nbytes, held, lost.numel()),
        residual is not None,
    )


@triton.jit(do_not_specialize=["rows", "row_bytes", "gap_count", "shards", "held", "room"])
def _finish(
    payload, words, residual, lost, bad, pieces, rows, row_bytes,
    gaps, gap_count, shards, payload_bytes, held, room, FEEDBACK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    failed = tl.load(bad)
    at = program * 0
    while at < rows * row_bytes.to(tl.int64):
        failed += (tl.load(pieces + at) != 1).to(tl.int32)
        at += row_bytes
    within = tl.arange(0, _WORDS)
    if failed == 0:
        shard = program
        while shard < shards:
            base = shard * (payload_bytes // shards)
            tl.store(words + base // 8, 1)
            gap = shard
            while gap < gap_count * shards:
                _clear(
                    payload + base, tl.load(gaps + gap), tl.load(gaps + gap_count * shards + gap)
                )
                gap += shards
            shard += programs
        if FEEDBACK:
            at = held + program * _WORDS
            while at < room:
                tl.store(lost + at + within, 0.0, mask=at + within < room)
                at += programs * _WORDS
    else:
        at = program * _WORDS
        while at < payload_bytes // 8:
            tl.store(words + at + within, 0, mask=at + within < payload_bytes // 8)
            at += programs * _WORDS
        if FEEDBACK:
            at = program * _WORDS
            while at < room:
                old = tl.load(residual + at + within, mask=at + within < room)
                tl.store(lost + at + within, old, mask=at + within < room)
                at += programs * _WORDS


@triton.jit
def _clear(payload, start, end):
    within = tl.arange(0, _WORDS)
    at = start
    while at < end:
        tl.store(payload + at + within, 0, mask=at + within < end)
        at += _WORDS
