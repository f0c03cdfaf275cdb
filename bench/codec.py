"""Time per element of encoding and decoding gradients, as multiples of a copy of as many bytes.

    python -m bench.codec [--elements 6553600] [--rounds 15] [--inductor]

One thread. Each round runs every codec once and beside it a copy that reads and writes as many bytes together
as it does; medians of times, and of the ratios round by round. Encoding includes error feedback where there
is any: flat and residual are read, payload and new residual written. Decoding takes the mean of two payloads.
Memory that was freed is kept for the next result: no page faults are timed. `--inductor` adds what Inductor
makes of the quantisers written in ATen operators.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from custom_ops import quantise, topk, wire16
from custom_ops.layout import Layout, Layout16, TopKLayout

RANKS = 2
UNTIMED_ROUNDS = 2
GROUP = 128
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
RATIO_GOAL = 1.5
TOPK_GOAL_NS = 4.0


@dataclasses.dataclass(frozen=True)
class Codec:
    """A way to send a bucket: `encode(flat, residual)` returns the payload first, `decode` takes stacked
    payloads."""

    encode: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    decode: Callable[[Tensor], Tensor]
    goals: Callable[[Timing, Timing], str]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians: nanoseconds per element, multiple of a copy."""

    ns: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.ns:9.2f} {self.ratio:6.2f}"


def within_copies(encoding: Timing, decoding: Timing) -> str:
    met = max(encoding.ratio, decoding.ratio) <= RATIO_GOAL
    return f"both <= {RATIO_GOAL} copies: {'met' if met else 'missed'}"


def fast_selection(encoding: Timing, decoding: Timing) -> str:
    return f"encode <= {TOPK_GOAL_NS} ns: {'met' if encoding.ns <= TOPK_GOAL_NS else 'missed'}"


def no_goal(encoding: Timing, decoding: Timing) -> str:
    return ""


def codecs(numel: int) -> dict[str, Codec]:
    found = {
        "int8": _quantiser(Layout((numel,), bits=8, group=GROUP), within_copies),
        "int4": _quantiser(Layout((numel,), bits=4, group=GROUP), within_copies),
        "int8 asymmetric": _quantiser(
            Layout((numel,), symmetric=False, group=GROUP), within_copies
        ),
        "int4 rotated": _quantiser(Layout((numel,), bits=4, rotate=True, group=GROUP), no_goal),
    }
    seed = torch.tensor(1)
    found["int8 stochastic"] = _quantiser(Layout((numel,), group=GROUP), no_goal, seed)
    for dtype in ("fp16", "bf16"):
        fields = Layout16(numel, 1, dtype).fields
        found[dtype] = Codec(
            lambda flat, residual, fields=fields: (wire16.encode16(flat, *fields),),
            lambda payloads, fields=fields: wire16.decode16(payloads, *fields),
            no_goal,
        )
    fields = TopKLayout(numel, 0.01).fields
    found["topk 1 %"] = Codec(
        lambda flat, residual: topk.topk_encode(flat, residual, *fields),
        lambda payloads: topk.topk_decode(payloads, *fields),
        fast_selection,
    )
    return found


def _quantiser(layout: Layout, goals: Callable[..., str], seed: Tensor | None = None) -> Codec:
    return Codec(
        lambda flat, residual: quantise.quantise(flat, residual, seed, *layout.fields),
        lambda payloads: quantise.dequantise(payloads, *layout.fields),
        goals,
    )


def inductor_codec(bits: int) -> Codec:
    """Symmetric quantisation in ATen operators, for one parameter of whole groups."""
    middle = 2 ** (bits - 1) - 1

    def encode(flat: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        values = (flat + residual).view(-1, GROUP)
        scale = (values.abs().amax(1, keepdim=True) / middle).clamp(min=2.0**-100).bfloat16()
        points = (values * (1 / scale.float())).round()
        codes = (points + middle).to(torch.uint8)
        if bits == 4:
            codes = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
        payload = torch.cat([scale.view(torch.uint8).flatten(), codes.flatten()])
        return payload, (values - points * scale.float()).flatten()

    def decode(payloads: Tensor) -> Tensor:
        groups = payloads.shape[1] * 8 // (16 + GROUP * bits)
        scale = payloads[:, : 2 * groups].contiguous().view(torch.bfloat16).float()[:, :, None]
        codes = payloads[:, 2 * groups :].unflatten(1, (groups, -1))
        if bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=2)
        return ((codes.float() - middle) * scale).mean(0).flatten()

    return Codec(torch.compile(encode), torch.compile(decode), no_goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25 * 2**18, help="a multiple of 128")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inductor", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    timed = codecs(args.elements)
    if args.inductor:
        timed |= {f"int{bits} Inductor": inductor_codec(bits) for bits in (8, 4)}
    print(f"{args.elements} elements, mean of {RANKS}")
    print(
        f"{'codec':16} {'bits':>6} {'encode ns':>9} {'copies':>6} {'decode ns':>9} {'copies':>6}   goals"
    )
    for name, (bits, encoding, decoding) in measured(timed, args.elements, args.rounds).items():
        goals = timed[name].goals(encoding, decoding)
        print(f"{name:16} {bits:6.2f} {encoding} {decoding}   {goals}")


def keep_memory() -> None:
    """Let the C library give no memory back (glibc's mallopt)."""
    libc = ctypes.CDLL(None)
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
        if not libc.mallopt(option, value):
            raise RuntimeError(f"mallopt({option}, {value}) failed")


def measured(
    timed: dict[str, Codec], numel: int, rounds: int
) -> dict[str, tuple[float, Timing, Timing]]:
    """Bits per element on the wire, and times of encoding and decoding."""
    flat, residual = torch.randn(numel), torch.randn(numel) * 1e-2
    works: dict[tuple[str, str], Callable[[], object]] = {}
    copies: dict[tuple[str, str], Callable[[], object]] = {}
    bits = {}
    for name, codec in timed.items():
        results = codec.encode(flat, residual)
        payloads = torch.stack([results[0]] * RANKS)
        bits[name] = 8 * results[0].numel() / numel
        read = 2 if len(results) == 2 else 1  # with error feedback, or without
        encoded_bytes = 4 * numel * read + sum(r.nbytes for r in results)
        works[name, "encode"] = lambda codec=codec: codec.encode(flat, residual)
        works[name, "decode"] = lambda codec=codec, payloads=payloads: codec.decode(payloads)
        for step, moved in (("encode", encoded_bytes), ("decode", payloads.nbytes + 4 * numel)):
            source = torch.ones(moved // 2, dtype=torch.uint8)
            copies[name, step] = functools.partial(torch.ones_like(source).copy_, source)
    seconds = {key: ([], []) for key in works}
    for index in range(UNTIMED_ROUNDS + rounds):
        for key in works:
            pair = _seconds(copies[key]), _seconds(works[key])
            for times, time_s in zip(seconds[key], pair, strict=True):
                if index >= UNTIMED_ROUNDS:
                    times.append(time_s)
    timings = {
        key: Timing(
            statistics.median(work) * 1e9 / numel,
            statistics.median(b / a for a, b in zip(copy, work, strict=True)),
        )
        for key, (copy, work) in seconds.items()
    }
    return {name: (bits[name], timings[name, "encode"], timings[name, "decode"]) for name in timed}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
