"""What the benchmarks of step time share: a GPT's training step in its variants, timed in turn on each rank."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench.gpt import GPT, LINK

UNTIMED_STEPS = 3  # compilation and first touches of memory
COLLECTIVE_TIMEOUT_S = 120  # one rank may wait for the other's compilation
_RESULT = "result: "

Step = Callable[[], float]
Wrap = Callable[[nn.Module], Callable[..., torch.Tensor]]


def start_rank() -> None:
    """Join the other ranks; called first in each rank's process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    torch._dynamo.config.optimize_ddp = False


def finish_rank(result: Mapping[str, Any]) -> None:
    """Leave the other ranks; rank 0 prints its result, for `result_of`."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        print(f"\n{_RESULT}{json.dumps(result)}", flush=True)


def result_of(output: str) -> dict[str, Any]:
    """What rank 0 handed to `finish_rank`, from what it printed."""
    (line,) = (line for line in output.splitlines() if line.startswith(_RESULT))
    return json.loads(line.removeprefix(_RESULT))


def hardened(bucket_mb: float, **options: Any) -> Wrap:
    options = {"bucket_mb": bucket_mb, **options}
    return lambda model: torch.compile(model, backend="hardened", options=options)


def ddp(bucket_mb: float, hook: Callable[..., Any] | None = None) -> Wrap:
    """DistributedDataParallel around the model, Inductor's graphs inside it.

    Args:
        hook: what it sends its buckets through.
    """

    def wrap(model: nn.Module) -> Callable[..., torch.Tensor]:
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        if hook is not None:
            parallel.register_comm_hook(None, hook)
        return torch.compile(parallel)

    return wrap


def training_step(wrap: Wrap, batch: int, block: int) -> Step:
    """A function that runs one training step and returns its seconds.

    Args:
        batch: sequences per rank.
        block: tokens per sequence.
    """
    torch.manual_seed(0)
    model = GPT(LINK)
    tokens = torch.randint(0, 256, (batch, block + 1))
    return step_of(model, wrap(model), tokens[:, :-1], tokens[:, 1:])


def step_of(
    model: nn.Module,
    compiled: Callable[..., torch.Tensor],
    inputs: torch.Tensor,
    classes: torch.Tensor,
    updates: bool = True,
) -> Step:
    """A function that runs one training step of a classifier and returns its seconds.

    Args:
        classes: for each row of the model's logits.
        updates: without, it ends behind the backward.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        started = time.perf_counter()
        logits = compiled(inputs)
        F.cross_entropy(logits.flatten(0, -2), classes.flatten()).backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - started
        seconds = time.perf_counter() - started
        optimizer.zero_grad()
        return seconds

    return step


def timed_in_turn(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, after a few steps that are not timed.

    Every other round runs in reverse, so that no step always has the same one in front of it.
    """
    for step in steps.values():
        for _ in range(UNTIMED_STEPS):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        for name in list(steps)[:: -1 if index % 2 else 1]:
            dist.barrier()
            times[name].append(steps[name]())
    return times


def ratios(times: Mapping[str, list[float]], name: str, base: str) -> list[float]:
    """Of neighbouring steps, round by round."""
    return [a / b for a, b in zip(times[name], times[base], strict=True)]
