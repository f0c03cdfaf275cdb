"""Steps over a slow link, compressed or not: measured, as predicted, and beside DistributedDataParallel.

    python -m bench.schedule [--ranks 2 4] [--rate 1gbit] [--models gpt cnn] [--rounds 10] [--keep]

For each number of ranks two runs, each with every rank on its link. The first calibrates: rates of computing
and coding with all ranks at once, the link, and each model's step without any communication. The second times
steps of each scheme, of DDP and, once more, without any communication in turn. What is predicted comes from
the first, with rates of computing that explain the second's step without communication, since a machine's pace
changes from minute to minute: no step that sends anything is part of it. `bound` is 1.05 times the larger of
computing and coding (measured, without communication, and the cost model's) and the bytes to send divided by
the rate, plus the last bucket's tail.
`--keep` also writes bench/results/schedule.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bench import RESULTS
from bench.cnn import CNN
from bench.exchange import BITS_PER_S
from bench.gpt import GPT, LINK, GPTConfig
from bench.steps import (
    Step,
    ddp,
    finish_rank,
    hardened,
    ratios,
    result_of,
    start_rank,
    step_of,
    timed_in_turn,
)
from bench.testbed import Testbed
from fxpasses.schedule.calibrate import measured_rates, scaled
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.plan import Plan, plan_step
from fxpasses.schedule.tasks import CODEC
from fxpasses.schedule.tasks import LINK as WIRE
from fxpasses.trace import trace

SCHEMES = ("none", "int8", "int4", "topk")
TABLE = RESULTS / "schedule.txt"
TIMEOUT_S = 3600
MACHINES = "BENCH_SCHEDULE_MACHINES"  # environment: each model's rates, for the ranks
STEP, GRADIENTS = "step", "gradients"  # without communication
STEP_GOAL, DDP_GOAL, ERROR_GOAL = 1.05, 1.00, 0.037

Made = tuple[nn.Module, torch.Tensor, torch.Tensor]  # model, inputs, classes


def gpt(config: GPTConfig, batch: int, block: int) -> Made:
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab, (batch, block + 1))
    return GPT(config), tokens[:, :-1], tokens[:, 1:]


def cnn(batch: int, **sizes: Any) -> Made:
    torch.manual_seed(0)
    model = CNN(**sizes)
    images = torch.randn(batch, 3, 32, 32)
    return model, images, torch.randint(0, model.head.out_features, (batch,))


MODELS: dict[str, Callable[[], Made]] = {
    "gpt": lambda: gpt(LINK, batch=8, block=64),
    "cnn": lambda: cnn(batch=16),
    # To see that it works, in a minute or two.
    "tiny-gpt": lambda: gpt(GPTConfig(vocab=64, block=32, layers=2, width=128), batch=2, block=32),
    "tiny-cnn": lambda: cnn(batch=2, widths=(16, 32), classes=10),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One model, number of ranks and scheme; seconds, medians."""

    model: str
    ranks: int
    scheme: str
    measured: float
    predicted: float
    bound: float
    of_ddp: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured

    def text(self) -> str:
        goals = f"<= bound: {_verdict(self.measured <= self.bound)}, "
        goals += f"<= DDP: {_verdict(self.of_ddp <= DDP_GOAL)}"
        times = f"{self.measured * 1e3:9.1f} {self.predicted * 1e3:9.1f} {self.error:7.1%}"
        head = f"{self.model:9} {self.ranks:5} {self.scheme:6} {times}"
        return f"{head} {self.bound * 1e3:9.1f} {self.of_ddp:7.3f}   {goals}"


HEADER = (
    f"{'model':9} {'ranks':>5} {'scheme':6} {'step ms':>9} {'predicted':>9} {'error':>7} {'bound ms':>9} "
    f"{'of DDP':>7}   goals"
)


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def calibrate(args: argparse.Namespace) -> None:
    """On each rank: rates, and steps that send nothing."""
    start_rank()
    machine = dataclasses.asdict(measured_rates())
    local = {}
    for name in args.models:
        times = timed_in_turn(steps_alone(name), args.rounds)
        local[name] = statistics.median(times[GRADIENTS])
    finish_rank({"machine": machine, "local": local})


def steps_alone(name: str) -> dict[str, Step]:
    """A model's step, and its part up to the gradients, without communication."""
    model, inputs, classes = MODELS[name]()
    compiled = torch.compile(model)
    return {
        STEP: step_of(model, compiled, inputs, classes),
        GRADIENTS: step_of(model, compiled, inputs, classes, updates=False),
    }


def worker(args: argparse.Namespace) -> None:
    """On each rank: steps of each scheme, of DDP and without communication, in turn."""
    start_rank()
    machines = json.loads(os.environ[MACHINES])
    found: dict[str, Any] = {}
    for name in args.models:
        wraps = {"ddp": ddp(args.bucket_mb)}
        for scheme in args.schemes:
            wraps[scheme] = hardened(args.bucket_mb, **options(args, scheme, machines[name]))
        steps = steps_alone(name)
        for key, wrap in wraps.items():
            model, inputs, classes = MODELS[name]()
            steps[key] = step_of(model, wrap(model), inputs, classes)
        found[name] = timed_in_turn(steps, args.rounds)
    finish_rank(found)


def options(args: argparse.Namespace, scheme: str, machine: dict[str, Any]) -> dict[str, Any]:
    return {"compression": scheme, "schedule": args.schedule, "machine": machine}


def rows(args: argparse.Namespace, ranks: int) -> Iterator[Row]:
    """Both runs of one number of ranks."""
    first = result_of(_run(ranks, args.rate, "--calibrate"))
    measured = Machine.parse(first["machine"])
    machines = {}
    for name in args.models:
        rates = scaled(measured, alone(name, measured) / first["local"][name])
        machines[name] = dataclasses.asdict(rates)
    os.environ[MACHINES] = json.dumps(machines)
    second = result_of(_run(ranks, args.rate, "--worker"))
    bytes_per_s = float(args.rate[:-4]) * BITS_PER_S[args.rate[-4:]] / 8
    for name in args.models:
        times = second[name]
        step, gradients = (statistics.median(times[key]) for key in (STEP, GRADIENTS))
        rates = scaled(measured, alone(name, measured) / gradients)
        model, inputs, _ = MODELS[name]()
        for scheme in args.schemes:
            # What the ranks compiled, with their rates; and what it takes.
            chosen = {"bucket_mb": args.bucket_mb, **options(args, scheme, machines[name])}
            plan = plan_step(trace(model, (inputs,), chosen, world=ranks), rates, ranks)
            floor = sum(row.sent_bytes for row in plan.buckets) / bytes_per_s
            yield Row(
                name,
                ranks,
                scheme,
                statistics.median(times[scheme]),
                plan.step_s + step - gradients,
                STEP_GOAL * max(step + plan.busy_s["codec"], floor) + tail(plan),
                statistics.median(ratios(times, scheme, "ddp")),
            )


def alone(name: str, machine: Machine) -> float:
    """Seconds of forward and backward on one rank that the rates predict."""
    model, inputs, _ = MODELS[name]()
    return plan_step(trace(model, (inputs,)), machine, 1).step_s


def tail(plan: Plan) -> float:
    """Seconds that the last bucket is on the wire and decoded: nothing is left to hide them."""
    last = plan.buckets[-1].parameters
    pairs = list(zip(plan.program.works, plan.program.tasks, strict=True))
    own = [(work, task) for work, task in pairs if work.bucket == last]
    launched = next(i for i, (work, _) in enumerate(own) if work.kind == WIRE)
    return sum(task.duration for work, task in own[launched:] if work.kind in (WIRE, CODEC))


def _run(ranks: int, rate: str, what: str) -> str:
    with Testbed(ranks, rate) as bed:
        if not bed.isolated:
            raise SystemExit("bench.schedule: needs root and iproute2")
        command = [sys.executable, "-m", "bench.schedule", what, *sys.argv[1:]]
        return bed.run(command, timeout_s=TIMEOUT_S)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", default="1gbit", help="such as 1gbit or 100mbit")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "cnn"])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--schedule", choices=("fixed", "auto"), default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--keep", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.calibrate or args.worker:
        (calibrate if args.calibrate else worker)(args)
        return
    lines = [HEADER]
    print(HEADER)
    found: list[Row] = []
    for ranks in args.ranks:
        for row in rows(args, ranks):
            found.append(row)
            lines.append(row.text())
            print(lines[-1], flush=True)
    error = statistics.median(row.error for row in found)
    lines.append(
        f"median error {error:.2%} over {len(found)} configurations, none of them used to calibrate "
        f"(<= {ERROR_GOAL:.1%}: {_verdict(error <= ERROR_GOAL)})"
    )
    print(lines[-1])
    if args.keep:
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
