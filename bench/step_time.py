"""Step time of one GPT over a link: the hardened backend against DistributedDataParallel + Inductor.

    python -m bench.step_time [--ranks 2] [--rate 1gbit] [--rounds 12] [--batch 1] [--block 64]

Both train the same model in the same processes, a step of each in turn, so that drift hits both alike;
quoted are medians, and the median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from bench.steps import (
    ddp,
    finish_rank,
    hardened,
    ratios,
    result_of,
    start_rank,
    timed_in_turn,
    training_step,
)
from bench.testbed import Testbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--block", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    with Testbed(args.ranks, args.rate) as bed:
        command = [sys.executable, "-m", "bench.step_time", "--worker", *sys.argv[1:]]
        outputs = bed.run(command, timeout_s=1200)
    print(result_of(outputs[0])["table"])


def worker(args: argparse.Namespace) -> None:
    start_rank()
    wraps = {
        "hardened": hardened(args.bucket_mb),
        "ddp": ddp(args.bucket_mb),
        "local": torch.compile,
    }
    steps = {name: training_step(wrap, args.batch, args.block) for name, wrap in wraps.items()}
    times = timed_in_turn(steps, args.rounds)
    finish_rank({"times": times, "table": table(times)})


def table(times: dict[str, list[float]]) -> str:
    rows = [f"{'':10} {'median s':>9} {'min s':>8} {'of ddp':>8}"]
    for name, seconds in times.items():
        ratio = statistics.median(ratios(times, name, "ddp"))
        rows.append(f"{name:10} {statistics.median(seconds):9.3f} {min(seconds):8.3f} {ratio:8.3f}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
