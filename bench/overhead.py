"""Step time of the hardened backend as a multiple of DistributedDataParallel + Inductor's.

    python -m bench.overhead [--ranks 2 4] [--links loopback 1gbit] [--rounds 12] [--batch 1] [--block 64]

For each link and number of ranks: a step of each in turn, in the same processes; medians, and median and
quartiles of the ratio of neighbouring steps. Then what it costs that ranks agree before a backward
communicates, as shares of the step: `agreed` is the time inside `fxpasses::agreement` in profiled steps, the
wait for the slowest rank's forward included ("n/a" if nothing has that label); `bare` is an all-reduce of as
few bytes right behind a barrier.

A link other than `loopback` is a rate as `tc` writes it; it needs root and iproute2.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from bench.steps import (
    UNTIMED_STEPS,
    Step,
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

LOOPBACK = "loopback"
AGREEMENT = "fxpasses::agreement"
AGREEMENT_NUMEL = 8  # int64
PROFILED_STEPS = 4
TIMEOUT_S = 1200  # of one link and number of ranks, compilation included

RATIO_GOAL = 1.02
AGREEMENT_GOAL = 0.01


@dataclasses.dataclass(frozen=True)
class Overhead:
    """What was measured on one link; times and shares are medians.

    Attributes:
        ratio_by_round: hardened / ddp.
        agreed_share: of the hardened step; None without an agreement.
        bare_share: of the hardened step.
    """

    hardened_s: float
    ddp_s: float
    ratio_by_round: list[float]
    agreed_share: float | None
    bare_share: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratio_by_round)

    def row(self) -> str:
        low, _, high = statistics.quantiles(self.ratio_by_round, n=4, method="inclusive")
        times = f"{self.hardened_s * 1e3:11.1f} {self.ddp_s * 1e3:9.1f}"
        spread = f"{self.ratio:6.3f} {low:6.3f} - {high:.3f}"
        return f"{times} {spread} {_percent(self.agreed_share)} {_percent(self.bare_share)}"

    def goals(self) -> str:
        ratio = _verdict(self.ratio, RATIO_GOAL)
        agreement = _verdict(self.agreed_share, AGREEMENT_GOAL)
        return f"ratio <= {RATIO_GOAL}: {ratio}; agreement <= {AGREEMENT_GOAL:.0%}: {agreement}"


HEADER = (
    f"{'link':10} {'ranks':>5} {'hardened ms':>11} {'ddp ms':>9} {'ratio':>6} {'quartiles':>14} "
    f"{'agreed':>8} {'bare':>8}   goals"
)


def _percent(share: float | None) -> str:
    return f"{'n/a' if share is None else f'{share:.2%}':>8}"


def _verdict(value: float | None, goal: float) -> str:
    if value is None:
        return "n/a"
    return "met" if value <= goal else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", nargs="+", default=[LOOPBACK, "1gbit"])
    parser.add_argument("--rounds", type=_at_least_two, default=12)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--block", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    print(HEADER)
    for link in args.links:
        for ranks in args.ranks:
            print(f"{link:10} {ranks:5}", measured(link, ranks), flush=True)


def measured(link: str, ranks: int) -> str:
    """The rest of a row of the table."""
    bed = Testbed(ranks, None if link == LOOPBACK else link)
    if link != LOOPBACK and not bed.isolated:
        return "left out: needs root and iproute2"
    with bed:
        command = [sys.executable, "-m", "bench.overhead", "--worker", *sys.argv[1:]]
        outputs = bed.run(command, timeout_s=TIMEOUT_S)
    overhead = Overhead(**result_of(outputs[0]))
    return f"{overhead.row()}   {overhead.goals()}"


def worker(args: argparse.Namespace) -> None:
    start_rank()
    wraps = {"hardened": hardened(args.bucket_mb), "ddp": ddp(args.bucket_mb)}
    steps = {name: training_step(wrap, args.batch, args.block) for name, wrap in wraps.items()}
    times = timed_in_turn(steps, args.rounds)
    step_s = statistics.median(times["hardened"])
    agreed_s = agreement_seconds(steps["hardened"])
    result = Overhead(
        hardened_s=step_s,
        ddp_s=statistics.median(times["ddp"]),
        ratio_by_round=ratios(times, "hardened", "ddp"),
        agreed_share=agreed_s and agreed_s / step_s,
        bare_share=all_reduce_seconds(args.rounds) / step_s,
    )
    finish_rank(dataclasses.asdict(result))


def agreement_seconds(step: Step) -> float | None:
    """What a step spends in agreement; None if no step has any.

    The step's own time is not taken from here: profiling makes it longer.
    """
    seconds: list[float] = []
    for _ in range(PROFILED_STEPS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.barrier()  # in here: ranks take their own time to start profiling
            step()
        found: list[Any] = [e for e in profile.events() if e.name == AGREEMENT]
        seconds += [sum(e.time_range.elapsed_us() for e in found) / 1e6] if found else []
    return statistics.median(seconds) if seconds else None


def all_reduce_seconds(rounds: int) -> float:
    """An all-reduce of as many integers as an agreement takes."""
    payload = torch.zeros(AGREEMENT_NUMEL, dtype=torch.int64)
    seconds = []
    for _ in range(UNTIMED_STEPS + rounds):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(payload)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[UNTIMED_STEPS:])


def _at_least_two(word: str) -> int:
    number = int(word)
    if number < 2:
        raise argparse.ArgumentTypeError(f"quartiles need at least 2 rounds, got {number}")
    return number


if __name__ == "__main__":
    main()
