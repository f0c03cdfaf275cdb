"""Step time of one GPT over a link: schemes of the hardened backend, DDP with Inductor, its fp16 hook.

    python -m bench.step_time [--ranks 2] [--rates 1gbit 100mbit] [--schemes none int4] [--rounds 12]

All train the same model in the same processes, a step of each in turn, so that drift hits all alike;
quoted are medians, and the median of the ratios of neighbouring steps. `local` sends nothing. `--keep` also
writes bench/results/step_time.txt.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from bench import RESULTS
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

TABLE = RESULTS / "step_time.txt"
TIMEOUT_S = 2400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--schemes", nargs="+", default=["none", "int8", "int4", "topk"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--block", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    lines = [
        f"GPT, batch {args.batch} x {args.block}, buckets of {args.bucket_mb:g} MiB, torch {torch.__version__}"
    ]
    for rate in args.rates:
        with Testbed(args.ranks, rate) as bed:
            command = [sys.executable, "-m", "bench.step_time", "--worker", *sys.argv[1:]]
            outputs = bed.run(command, timeout_s=TIMEOUT_S)
        where = "a link each" if bed.isolated else "no link: loopback"
        lines += ["", f"{args.ranks} ranks, {rate} ({where})", result_of(outputs[0])["table"]]
        print("\n".join(lines[-3:]), flush=True)
    if args.keep:
        TABLE.write_text("\n".join(lines) + "\n")


def worker(args: argparse.Namespace) -> None:
    start_rank()
    wraps = {
        "local": torch.compile,
        "ddp": ddp(args.bucket_mb),
        "ddp fp16": ddp(args.bucket_mb, fp16_compress_hook),
        **{scheme: hardened(args.bucket_mb, compression=scheme) for scheme in args.schemes},
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
