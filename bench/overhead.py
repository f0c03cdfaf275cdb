"""Step time of the hardened backend as a multiple of DistributedDataParallel + Inductor's.

    python -m bench.overhead [--ranks 2 4] [--links loopback 1gbit] [--rounds 40] [--batch 1] [--block 64]

For each link and number of ranks: a step of each in turn, in the same processes; medians, and median and
quartiles of the ratio of neighbouring steps. Then what it costs that ranks agree before a backward
communicates, as shares of the step: `agreement` is how much longer it is than the same step with the agreement
left out, also in turn; `inside` is the time spent in `fxpasses::agreement` in profiled steps, the wait for the
slowest rank's forward included, most of which moves there from the first bucket's.

A link other than `loopback` is a rate as `tc` writes it; it needs root and iproute2.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench.steps import (
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
PROFILED_STEPS = 4
TIMEOUT_S = 1200  # of one link and number of ranks, compilation included

RATIO_GOAL = 1.02
AGREEMENT_GOAL = 0.01


@dataclasses.dataclass(frozen=True)
class Overhead:
    """What was measured on one link; times and shares are medians.

    Attributes:
        ratio_by_round: hardened / ddp.
        agreement_by_round: hardened / the same without agreement.
        inside_share: of the hardened step.
    """

    hardened_s: float
    ddp_s: float
    ratio_by_round: list[float]
    agreement_by_round: list[float]
    inside_share: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratio_by_round)

    @property
    def agreement(self) -> float:
        """The agreement's share of the step."""
        return 1 - 1 / statistics.median(self.agreement_by_round)

    def row(self) -> str:
        low, _, high = statistics.quantiles(self.ratio_by_round, n=4, method="inclusive")
        times = f"{self.hardened_s * 1e3:11.1f} {self.ddp_s * 1e3:9.1f}"
        spread = f"{self.ratio:6.3f} {low:6.3f} - {high:.3f}"
        return f"{times} {spread} {self.agreement:9.2%} {self.inside_share:7.2%}"

    def goals(self) -> str:
        ratio = _verdict(self.ratio, RATIO_GOAL)
        agreement = _verdict(self.agreement, AGREEMENT_GOAL)
        return f"ratio <= {RATIO_GOAL}: {ratio}; agreement <= {AGREEMENT_GOAL:.0%}: {agreement}"


HEADER = (
    f"{'link':10} {'ranks':>5} {'hardened ms':>11} {'ddp ms':>9} {'ratio':>6} {'quartiles':>14} "
    f"{'agreement':>9} {'inside':>7}   goals"
)


def _verdict(value: float, goal: float) -> str:
    return "met" if value <= goal else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", nargs="+", default=[LOOPBACK, "1gbit"])
    parser.add_argument("--rounds", type=_at_least_two, default=40)
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
    steps["unagreed"] = without_agreement(steps["hardened"])
    times = timed_in_turn(steps, args.rounds)
    step_s = statistics.median(times["hardened"])
    result = Overhead(
        hardened_s=step_s,
        ddp_s=statistics.median(times["ddp"]),
        ratio_by_round=ratios(times, "hardened", "ddp"),
        agreement_by_round=ratios(times, "hardened", "unagreed"),
        inside_share=agreement_seconds(steps["hardened"]) / step_s,
    )
    finish_rank(dataclasses.asdict(result))


def without_agreement(step: Step) -> Step:
    """The same step, whose ranks take it for granted that they send the same."""

    def run() -> float:
        with mock.patch("fxpasses.synchronise.agree", lambda *_: None):
            return step()

    return run


def agreement_seconds(step: Step) -> float:
    """What a step spends in agreement, waiting for other ranks included.

    The step's own time is not taken from here: profiling makes it longer.
    """
    seconds: list[float] = []
    for _ in range(PROFILED_STEPS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.barrier()  # in here: ranks take their own time to start profiling
            step()
        found: list[Any] = [e for e in profile.events() if e.name == AGREEMENT]
        assert found, f"no step has the label {AGREEMENT}"
        seconds.append(sum(e.time_range.elapsed_us() for e in found) / 1e6)
    return statistics.median(seconds)


def _at_least_two(word: str) -> int:
    number = int(word)
    if number < 2:
        raise argparse.ArgumentTypeError(f"quartiles need at least 2 rounds, got {number}")
    return number


if __name__ == "__main__":
    main()
