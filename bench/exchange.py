"""Reducing gradients in compressed form over a slow link, kernels included, beside an fp32 all-reduce.

    python -m bench.exchange [--ranks 2 4] [--rate 1gbit] [--elements 25600000] [--bucket-mb 25] [--rounds 8]

Each round runs every scheme once on the same gradients, in buckets as the pass `compress` sends them: all first
legs, then all second ones, then the waits. `floor` is the bytes that a rank has to send divided by the rate,
`of floor` the time as a multiple of it; `of fp32` how many times faster than the all-reduce, round by round;
`bytes` what the interface has counted, as a share of what the plan says. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench.steps import finish_rank, result_of, start_rank
from bench.testbed import DEVICE, Testbed
from fxpasses.codecs import codec_of
from fxpasses.compression import parse_rules, scheme_of
from fxpasses.distributed.group import process_group
from fxpasses.exchange import Coded
from fxpasses.feedback import feedback_of

SCHEMES = ("fp16", "int8", "int4", "topk:ratio=0.01")
UNTIMED_ROUNDS = 2
BITS_PER_S = {"gbit": 1e9, "mbit": 1e6}
# Time as a multiple of the floor, and times faster than the all-reduce.
GOALS = {"int8": (1.15, 3.4), "int4": (1.25, 6.2)}
TOPK_GOAL, TOPK_RANKS = 20.0, 4
TIMEOUT_S = 1800

Send = Callable[[], None]


class Reduction:
    """One way to reduce the gradients of a rank."""

    def __init__(self, scheme: str, elements: int, bucket_mb: float, group: str) -> None:
        self.world, self.rank, self.group = dist.get_world_size(), dist.get_rank(), group
        generator = torch.Generator().manual_seed(self.rank)
        most = int(bucket_mb * 2**18)  # elements of fp32
        sizes = [min(most, elements - start) for start in range(0, elements, most)]
        self.buckets = [torch.randn(size, generator=generator) for size in sizes]
        self.exchanges: list[Coded] = []
        if scheme != "fp32":
            chosen = scheme_of("all", parse_rules(scheme))
            self.exchanges = [
                Coded(
                    codec_of(chosen, [size], group, self.world, self.rank),
                    feedback_of(chosen),
                    ((f"bucket{index}", (size,)),),
                    chosen.stochastic,
                    index,
                )
                for index, size in enumerate(sizes)
            ]
        self.states = [
            [torch.zeros(s.shape, dtype=s.dtype) for s in exchange.states(torch.device("cpu"))]
            for exchange in self.exchanges
        ]

    def run(self) -> None:
        if not self.exchanges:
            launch = torch.ops._c10d_functional.all_reduce
            flying = [launch(bucket / self.world, "sum", self.group) for bucket in self.buckets]
            for one in flying:
                torch.ops._c10d_functional.wait_tensor(one)
            return
        wait = torch.ops._c10d_functional.wait_tensor
        flying, kept = [], []
        for exchange, bucket, olds in zip(self.exchanges, self.buckets, self.states, strict=True):
            payload, found = exchange.encode(bucket, olds)
            kept.append(found)
            flying.append(exchange.launch(payload))
        for index, exchange in enumerate(self.exchanges):
            if exchange.legs == 2:
                payload, kept[index] = exchange.recode(
                    wait(flying[index]), self.states[index], kept[index]
                )
                flying[index] = exchange.relaunch(payload)
        for index, exchange in enumerate(self.exchanges):
            olds, bucket = self.states[index], self.buckets[index]
            mean, found = exchange.decode(wait(flying[index]), olds, kept[index])
            for old, new in zip(olds, exchange.news(bucket, olds, found, mean), strict=True):
                old.copy_(new)

    def planned_bytes(self) -> float:
        """What a rank has to send."""
        share = (self.world - 1) / self.world
        if not self.exchanges:
            return 2 * share * sum(4 * b.numel() for b in self.buckets)
        total = 0.0
        for exchange in self.exchanges:
            size = exchange.codec.layout.payload_bytes
            if exchange.legs == 1:
                total += (self.world - 1) * size
            else:
                total += share * (size + exchange.codec.second_layout.payload_bytes)
        return total


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def worker(args: argparse.Namespace) -> None:
    start_rank()
    world_group = dist.group.WORLD
    assert world_group is not None
    group = world_group.group_name
    process_group(group)
    ways = {
        name: Reduction(name, args.elements, args.bucket_mb, group) for name in ("fp32", *SCHEMES)
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    counted: dict[str, list[int]] = {name: [] for name in ways}
    for index in range(UNTIMED_ROUNDS + args.rounds):
        for name in list(ways)[:: -1 if index % 2 else 1]:
            dist.barrier()
            before, started = sent_bytes(), time.perf_counter()
            ways[name].run()
            seconds = time.perf_counter() - started
            if index >= UNTIMED_ROUNDS:
                times[name].append(seconds)
                counted[name].append(sent_bytes() - before)
    planned = {name: way.planned_bytes() for name, way in ways.items()}
    finish_rank({"times": times, "counted": counted, "planned": planned})


def rows(ranks: int, rate: str, result: dict[str, dict[str, list[float]]]) -> list[str]:
    """A row for each scheme."""
    bytes_per_s = float(rate[:-4]) * BITS_PER_S[rate[-4:]] / 8
    times, found = result["times"], []
    for name, seconds in times.items():
        planned = result["planned"][name]
        floor = planned / bytes_per_s
        median = statistics.median(seconds)
        faster = statistics.median(a / b for a, b in zip(times["fp32"], seconds, strict=True))
        counted = statistics.median(result["counted"][name]) / planned
        goals = "" if ranks < 2 else _goals(name, ranks, median / floor, faster)
        figures = f"{median * 1e3:9.1f} {floor * 1e3:9.1f} {median / floor:8.2f} {faster:8.2f} {counted:7.3f}"
        found.append(f"{ranks:5} {name.split(':')[0]:6} {figures}   {goals}")
    return found


def _goals(name: str, ranks: int, of_floor: float, faster: float) -> str:
    if name.startswith("topk") and ranks == TOPK_RANKS:
        return f">= {TOPK_GOAL:g}x: {_verdict(faster >= TOPK_GOAL)}"
    if name not in GOALS:
        return ""
    most, least = GOALS[name]
    return f"<= {most:g}: {_verdict(of_floor <= most)}, >= {least:g}x: {_verdict(faster >= least)}"


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", default="1gbit", help="such as 1gbit or 100mbit")
    parser.add_argument("--elements", type=int, default=25_600_000)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    columns = f"{'ms':>9} {'floor':>9} {'of floor':>8} {'of fp32':>8} {'bytes':>7}"
    print(f"{'ranks':>5} {'scheme':6} {columns}   goals")
    for ranks in args.ranks:
        with Testbed(ranks, args.rate) as bed:
            if not bed.isolated:
                raise SystemExit("bench.exchange: needs root and iproute2")
            command = [sys.executable, "-m", "bench.exchange", "--worker", *sys.argv[1:]]
            result = result_of(bed.run(command, timeout_s=TIMEOUT_S)[0])
        print("\n".join(rows(ranks, args.rate, result)), flush=True)


if __name__ == "__main__":
    main()
