"""Bandwidth of the operators of `custom_ops`, beside a copy's in the same run and Inductor's code for the same
formula.

    python -m bench.kernels [--elements 268435456] [--rounds 20] [--keep]

On a GPU: each operator in Triton and in CUDA C++, on 2^28 elements; on the CPU in C++, on 2^22. Before it is
timed, its result is compared with fp64. GB/s are of the bytes that have to be moved: all inputs read once, all
results written once. A copy reads and writes as many bytes together, in the same round; shares are medians of
ratios round by round. What fails is reported, and the rest goes on. `--keep` writes the table, with card and
date, to bench/results/.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.codec import keep_memory
from custom_ops import checksum, faults, gradients, kernels, quantise, topk, wire16
from custom_ops.layout import CHUNK, Layout, Layout16, TopKLayout

GROUP = 128
RANKS = 4
RATIO = 0.01
TOPK_GOAL = 5.0
UNTIMED_ROUNDS = 3
AHEAD_CYCLES = 4_000_000  # of a GPU's clock: about 2 ms
TIMEOUT_S = 180  # for an operator, all its kernels to be compiled
CHECKED = 2**22  # elements that are compared with fp64
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Work:
    """An operator on a bucket.

    Attributes:
        run: returns the operator's results.
        reads: tensors that it has to read.
        check: raises `AssertionError` if results are not what fp64 says.
        goal: share of a copy's bandwidth, on an H200.
        inductor: the same formula in ATen operators, to be compiled; its arguments are `reads`.
        rival: another way to the same result, not compiled; its name comes first.
    """

    run: Callable[[], Any]
    reads: tuple[Tensor, ...]
    check: Callable[[Any], None]
    goal: float | None = None
    inductor: Callable[..., Any] | None = None
    rival: tuple[str, Callable[[], Any]] | None = None


def works(numel: int, device: torch.device) -> dict[str, Callable[[], Work]]:
    """By name; each makes its own tensors, so that they are gone before the next."""

    def flat(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(numel, device=device).to(dtype)

    def encoding(bits: int, dtype: torch.dtype, feedback: bool, goal: float) -> Work:
        layout = Layout((numel,), bits=bits, group=GROUP)
        values, residual = flat(dtype), flat() * 1e-2 if feedback else None
        reads = (values,) if residual is None else (values, residual)

        def check(results: tuple[Tensor, Tensor]) -> None:
            back = quantise.dequantise(results[0][None], *layout.fields)
            exact = sum(part[:CHECKED].double() for part in reads)
            lost = exact - back[:CHECKED].double()
            assert (lost.abs() <= half_a_scale(exact, bits)).all(), "errors above half a scale"
            if feedback:
                rounding = 2.0**-22 * exact.abs() + 2.0**-140
                assert ((results[1][:CHECKED].double() - lost).abs() <= rounding).all(), "residual"

        return Work(
            lambda: quantise.quantise(values, residual, None, *layout.fields),
            *(
                reads,
                check,
                goal,
                lambda *parts: encoded(sum(p.float() for p in parts), bits, feedback),
            ),
        )

    def decoding() -> Work:
        layout = Layout((numel,), group=GROUP)
        values = flat()
        payloads = quantise.quantise(values, None, None, *layout.fields)[0][None]

        def check(back: Tensor) -> None:
            exact = values[:CHECKED].double()
            error = (back[:CHECKED].double() - exact).abs()
            assert (error <= half_a_scale(exact, 8)).all(), "errors above half a scale"

        return Work(
            *(lambda: quantise.dequantise(payloads, *layout.fields), (payloads,), check, 0.88),
            lambda rows: decoded(rows, 8),
        )

    def reducing() -> Work:
        layout = Layout((numel,), group=GROUP)
        values = [flat() for _ in range(RANKS)]
        pieces = torch.stack([quantise.quantise(v, None, None, *layout.fields)[0] for v in values])
        exact = sum(v[:CHECKED].double() for v in values) / RANKS
        bound = sum(half_a_scale(v[:CHECKED].double(), 8) for v in values) / RANKS
        del values

        def check(results: tuple[Tensor, Tensor]) -> None:
            back = quantise.dequantise(results[0][None], *layout.fields)[:CHECKED].double()
            own = half_a_scale(exact.abs() + bound, 8)
            assert ((back - exact).abs() <= bound + own).all(), "errors of more than two scales"

        return Work(
            lambda: quantise.requantise(pieces, None, None, 0, 8, *layout.fields),
            *((pieces,), check, 0.85, lambda rows: encoded(decoded(rows, 8), 8, False)),
        )

    def selecting() -> Work:
        layout = TopKLayout(numel, RATIO)
        values, residual = flat(), flat() * 1e-2

        def check(results: tuple[Tensor, Tensor]) -> None:
            sent = topk.topk_decode(results[0][None], *layout.fields)[:CHECKED]
            total = (values + residual)[:CHECKED]
            assert (sent.double() + results[1][:CHECKED].double() == total.double()).all(), "lost"
            for part, of_sent in zip(total.split(CHUNK), sent.split(CHUNK), strict=True):
                is_sent = of_sent != 0
                assert int(is_sent.sum()) == min(len(part), -int(-RATIO * len(part) // 1)), "count"
                if not is_sent.all():
                    smallest, largest = part[is_sent].abs().min(), part[~is_sent].abs().max()
                    assert smallest >= largest, "not the largest"

        def with_topk() -> Any:
            total = (values + residual)[: numel // CHUNK * CHUNK].view(-1, CHUNK)
            where = total.abs().topk(layout.quota(0), dim=1, sorted=False).indices
            sent = total.gather(1, where)
            return sent.bfloat16(), where.short(), total.scatter(1, where, 0.0)

        return Work(
            lambda: topk.topk_encode(values, residual, *layout.fields),
            *((values, residual), check, 0.75, None, ("torch.topk", with_topk)),
        )

    def wire(dtype: str) -> Work:
        layout = Layout16(numel, 1, dtype)
        values = flat()

        def check(payload: Tensor) -> None:
            back = wire16.decode16(payload[None], *layout.fields)[:CHECKED].double()
            exact = values[:CHECKED].double()
            epsilon = 2.0**-11 if dtype == "fp16" else 2.0**-8
            assert ((back - exact).abs() <= epsilon * exact.abs() + 2.0**-30).all(), "errors"

        return Work(lambda: wire16.encode16(values, *layout.fields), (values,), check)

    def sealing() -> Work:
        payload = torch.randint(256, (numel // 8 * 8,), device=device, dtype=torch.uint8)

        def check(sealed: Tensor) -> None:
            assert not checksum.broken(sealed[None], 1).any(), "sealed, and broken"
            words = payload.view(torch.int32).double()
            rest = int(words.sum().item() - words[1].item()) & 0xFFFFFFFF
            assert int(sealed.view(torch.int32)[1]) & 0xFFFFFFFF == rest ^ 0xFFFFFFFF, "checksum"

        return Work(lambda: checksum.seal(payload, 1), (payload,), check)

    def unscaling() -> Work:
        values, factor = flat(), torch.tensor(1 / 3, device=device)

        def check(results: tuple[Tensor, Tensor, Tensor]) -> None:
            exact = values.double() * factor.double()
            assert ((results[0] - exact).abs() <= 2.0**-24 * exact.abs()).all(), "products"
            assert results[1] == 0 and abs(results[2] / exact.norm() - 1) < 1e-6, "norm"

        def formula(x: Tensor, by: Tensor) -> tuple[Tensor, ...]:
            product = x * by
            return product, (~product.isfinite()).any().float(), torch.linalg.vector_norm(product)

        return Work(
            lambda: gradients.unscale(values, factor), (values, factor), check, None, formula
        )

    def striking() -> Work:
        values = flat()
        row = torch.tensor([1, 12345, 0, 7, 0], device=device)

        def check(results: tuple[Tensor, Tensor]) -> None:
            changed = (results[0] != values).nonzero().flatten().tolist()
            assert changed == [12345 % numel], "which element"

        return Work(lambda: faults.strike(values, row, 1), (values,), check)

    return {
        "fp32 to int8": lambda: encoding(8, torch.float32, False, 0.92),
        "int8 to fp32": decoding,
        "bf16 to int4": lambda: encoding(4, torch.bfloat16, False, 0.85),
        "feedback + int8": lambda: encoding(8, torch.float32, True, 0.85),
        f"requantise W={RANKS}": reducing,
        "feedback + top-k 1 %": selecting,
        "fp32 to fp16": lambda: wire("fp16"),
        "fp32 to bf16": lambda: wire("bf16"),
        "seal": sealing,
        "unscale": unscaling,
        "strike": striking,
    }


def half_a_scale(exact: Tensor, bits: int) -> Tensor:
    """[n] fp64: the largest error that rounding to a group's codes may make, scales being bf16."""
    largest = exact.abs().view(-1, GROUP).amax(1, keepdim=True)
    scale = 2 * largest / (2**bits - 2) * (1 + 2.0**-7) * (1 + 2.0**-13)
    return (scale / 2).expand(-1, GROUP).reshape(-1)


def encoded(values: Tensor, bits: int, feedback: bool) -> tuple[Tensor, ...]:
    """Symmetric quantisation in ATen operators."""
    middle = 2 ** (bits - 1) - 1
    rows = values.view(-1, GROUP)
    scale = (rows.abs().amax(1, keepdim=True) / middle).clamp(min=2.0**-100).bfloat16()
    points = (rows * (1 / scale.float())).round()
    codes = (points + middle).to(torch.uint8)
    if bits == 4:
        codes = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    lost = ((rows - points * scale.float()).flatten(),) if feedback else ()
    return scale, codes, *lost


def decoded(payloads: Tensor, bits: int) -> Tensor:
    """The mean of payloads of `Layout`, in ATen operators."""
    groups = (payloads.shape[1] - 8) * 8 // (16 + GROUP * bits)
    scale = payloads[:, 8 : 8 + 2 * groups].view(torch.bfloat16).float()[:, :, None]
    codes = payloads[:, 8 + 2 * groups :][:, : groups * GROUP * bits // 8].unflatten(
        1, (groups, -1)
    )
    return ((codes.float() - (2 ** (bits - 1) - 1)) * scale).mean(0).flatten()


def implementations(device: torch.device) -> Iterable[str | None]:
    """Values of FXPASSES_KERNELS."""
    return (None,) if device.type == "cpu" else ("triton", "cuda")


def choose(implementation: str | None) -> None:
    os.environ.pop(kernels.CHOICE, None)
    if implementation is not None:
        os.environ[kernels.CHOICE] = implementation


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)  # meanwhile all is launched, so no launch is timed
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def medians(runs: dict[str, Callable[[], Any]], rounds: int, device: torch.device):
    """By name: seconds, and the share of the copy's speed; all in turn in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(UNTIMED_ROUNDS + rounds):
        for name, run in runs.items():
            taken = seconds(run, device)
            if index >= UNTIMED_ROUNDS:
                times[name].append(taken)
    shares = {
        name: statistics.median(c / t for c, t in zip(times["copy"], of_name, strict=True))
        for name, of_name in times.items()
    }
    return {name: (statistics.median(of_name), shares[name]) for name, of_name in times.items()}


def nbytes(results: Any) -> int:
    return sum(t.nbytes for t in (results if isinstance(results, tuple) else (results,)))


def made(make: Callable[[], Work], device: torch.device) -> Work:
    """By the first implementation that can make what an operator decodes."""
    errors = []
    for implementation in implementations(device):
        choose(implementation)
        try:
            return make()
        except Exception as error:
            traceback.print_exc()
            errors.append(f"{implementation}: {first_line(error)}")
    raise RuntimeError("; ".join(errors))


def measure(name: str, make: Callable[[], Work], rounds: int, device: torch.device) -> list[str]:
    """The lines of an operator."""
    work = made(make, device)
    runs: dict[str, Callable[[], Any]] = {}
    written: list[int] = []
    lines = []

    def chosen(implementation: str | None) -> Callable[[], Any]:
        def run() -> Any:
            choose(implementation)
            return work.run()

        return run

    def attempt(label: str, run: Callable[[], Any], check: Callable[[Any], None] | None) -> None:
        try:
            results = run()
            if check is not None:
                check(results)
                written.append(nbytes(results))
            runs[label] = run
        except Exception as error:
            traceback.print_exc()
            lines.append(
                f"{name:22} {label:12} failed: {type(error).__name__}: {first_line(error)}"
            )

    for implementation in implementations(device):
        attempt(implementation or "C++", chosen(implementation), work.check)
    if not written:
        return lines
    if work.inductor is not None:
        compiled = torch.compile(work.inductor)
        attempt("Inductor", lambda: compiled(*work.reads), None)
    if work.rival is not None:
        attempt(work.rival[0], work.rival[1], None)
    moved = nbytes(work.reads) + written[0]
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = medians({"copy": lambda: target.copy_(source), **runs}, rounds, device)
    return lines + [
        line(name, label, time_s, share, moved, work, found)
        for label, (time_s, share) in found.items()
    ]


def line(
    name: str,
    label: str,
    time_s: float,
    share: float,
    moved: int,
    work: Work,
    found: dict[str, tuple[float, float]],
) -> str:
    text = f"{name:22} {label:12} {time_s * 1e6:10.1f} {moved / time_s / 1e9:9.1f} {share:7.1%}"
    others = [found[other][0] for other in ("Inductor", "torch.topk") if other in found]
    if label in ("copy", "Inductor", "torch.topk"):
        return text
    if others:
        text += f" {others[0] / time_s:8.2f}x"
    if work.goal is None or not torch.cuda.is_available():
        return text
    ratio = 1.0 if work.rival is None else TOPK_GOAL
    is_met = share >= work.goal and bool(others) and others[0] / time_s >= ratio
    return f"{text}   >= {work.goal:.0%}, >= {ratio:.0f}x: {'met' if is_met else 'missed'}"


def first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def in_a_child(name: str, args: argparse.Namespace) -> list[str]:
    """An operator in a process of its own: what breaks a GPU's context, or hangs, ends with it."""
    sizes = ["--elements", str(args.elements), "--rounds", str(args.rounds)]
    command = [sys.executable, "-m", "bench.kernels", *sizes, "--operator", name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return [f"{name:22} failed: not done after {TIMEOUT_S} s"]
    lines = done.stdout.splitlines()
    return lines if not done.returncode else [*lines, f"{name:22} failed: exit {done.returncode}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    default = 2**28 if on_gpu else 2**22
    parser.add_argument("--elements", type=int, default=default, help="a multiple of 65536")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--operator", help="only this one, in this process, without a heading")
    parser.add_argument("--keep", action="store_true", help="write the table to bench/results")
    args = parser.parse_args()
    if not on_gpu:
        keep_memory()
    makers = works(args.elements, device)
    if args.operator is not None:
        print("\n".join(measure(args.operator, makers[args.operator], args.rounds, device)))
        return
    card = torch.cuda.get_device_name() if on_gpu else "CPU"
    today = datetime.datetime.now(datetime.UTC).date()
    numbers = f"{args.elements} elements, medians of {args.rounds}"
    columns = f"{'operator':22} {'by':12} {'us':>10} {'GB/s':>9} {'copy':>7} {'speed':>9}"
    lines = [
        f"{card}, {today}, torch {torch.__version__}: {numbers}",
        f"{columns}   goals on an H200",
    ]
    if not on_gpu:
        lines.insert(
            1, "no GPU was at hand: the goals, which are those of an H200, are not measured"
        )
    print("\n".join(lines), flush=True)
    for name in makers:
        found = in_a_child(name, args)
        print("\n".join(found), flush=True)
        lines += found
    if args.keep:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"kernels-{re.sub(r'[^A-Za-z0-9]+', '-', card)}.txt"
        path.write_text("\n".join([*lines, ""]))
        print(f"kept in {path}")


if __name__ == "__main__":
    main()
