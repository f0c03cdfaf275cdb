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
import datetime
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench import RESULTS
from bench.codec import keep_memory
from bench.kernel_work import Work, works
from custom_ops import kernels

TOPK_GOAL = 5.0
UNTIMED_ROUNDS = 3
AHEAD_CYCLES = 4_000_000  # of a GPU's clock: about 2 ms
TIMEOUT_S = 180  # for an operator, all its kernels to be compiled


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
        path = RESULTS / f"kernels-{re.sub(r'[^A-Za-z0-9]+', '-', card)}.txt"
        path.write_text("\n".join([*lines, ""]))
        print(f"kept in {path}")


if __name__ == "__main__":
    main()
