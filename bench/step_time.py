"""Step time of one GPT over a link: the hardened backend against DistributedDataParallel + Inductor.

    python -m bench.step_time [--ranks 2] [--rate 1gbit] [--rounds 12] [--batch 1] [--block 64]

Both train the same model in the same processes, a step of each in turn, so that drift hits both alike;
quoted are medians, and the median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench.gpt import GPT, LINK
from bench.testbed import Testbed

Step = Callable[[], float]


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
    print(json.loads(outputs[0].splitlines()[-1])["table"])


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch._dynamo.config.optimize_ddp = False
    steps = {
        "hardened": _step(args, lambda m: _hardened(m, args.bucket_mb)),
        "ddp": _step(args, lambda m: torch.compile(_ddp(m, args.bucket_mb))),
        "local": _step(args, torch.compile),
    }
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            dist.barrier()
            times[name].append(step())
    if dist.get_rank() == 0:
        print(json.dumps({"times": times, "table": table(times)}))
    dist.destroy_process_group()


def _hardened(model: nn.Module, bucket_mb: float) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="hardened", options={"bucket_mb": bucket_mb})


def _ddp(model: nn.Module, bucket_mb: float) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)


def _step(
    args: argparse.Namespace, wrap: Callable[[nn.Module], Callable[..., torch.Tensor]]
) -> Step:
    """A function that runs one training step and returns its seconds."""
    torch.manual_seed(0)
    model = GPT(LINK)
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (args.batch, args.block + 1))

    def step() -> float:
        started = time.perf_counter()
        logits = compiled(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    return step


def table(times: dict[str, list[float]]) -> str:
    rows = [f"{'':10} {'median s':>9} {'min s':>8} {'of ddp':>8}"]
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times["ddp"], strict=True))
        rows.append(f"{name:10} {statistics.median(seconds):9.3f} {min(seconds):8.3f} {ratio:8.3f}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
