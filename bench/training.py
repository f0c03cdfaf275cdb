"""The demo's training run, as each rank does it: text, batches, steps, evaluation."""

from __future__ import annotations

import dataclasses
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench.gpt import DEMO, GPT

RANKS = 2
SEED = 0
BATCH = 4  # sequences of a rank and step
PEAK_LEARNING_RATE = 5e-4
WARM_UP_STEPS = 30
HELD_OUT_WINDOWS = 128
HELD_OUT_EVERY = 50  # steps
UNTIMED_STEPS = 5  # compilation and first touches of memory
FIRST_STEPS = 20  # over which losses and gradient norms are compared

Wrap = Callable[[GPT], Callable[[torch.Tensor], torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class StepDone:
    """Rank 0 finished a step (counted from 1): its own batch's loss, the step's seconds."""

    step: int
    loss: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out loss in nats per byte after a number of steps, and payload bytes that a rank sent in them."""

    step: int
    loss: float
    sent_bytes: int


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run leaves behind.

    Attributes:
        losses_sr: training loss of each step and rank.
        gradient_norms_s: norm of the reduced gradient, all parameters together, of the first steps.
        seconds_s: duration of each step on rank 0.
        held_out: losses in the order of their steps.
        reduced_bytes: payload bytes that a rank hands to collectives in a step, on average.
    """

    losses_sr: np.ndarray
    gradient_norms_s: np.ndarray
    seconds_s: np.ndarray
    held_out: tuple[HeldOut, ...]
    reduced_bytes: float

    def quartiles_ms(self) -> tuple[float, float, float]:
        """Of the step times, without the first ones."""
        timed_s = self.seconds_s[min(UNTIMED_STEPS, len(self.seconds_s) - 1) :]
        low, median, high = np.percentile(timed_s, (25, 50, 75)) * 1e3
        return low, median, high


def standard_library() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library's `.py` files, uint8: (to train on, held out), whole files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if _belongs(path.relative_to(root))]
    if len(files) < 10:
        raise FileNotFoundError(f"the sources of Python's standard library are not in {root}")
    held_out = files[::10]
    train = [path for position, path in enumerate(files) if position % 10]
    return _read(train), _read(held_out)


def _belongs(path: Path) -> bool:
    folders = path.parts[:-1]
    outside = {"site-packages", "dist-packages", "test", "tests"}
    return not any(folder in outside or folder.endswith("_test") for folder in folders)


def _read(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def windows(text: torch.Tensor, starts_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut (tokens_bt, targets_bt), int64, out of a text; targets are one byte further on."""
    at = starts_b[:, None] + torch.arange(DEMO.block + 1)
    bytes_bt = text[at].long()
    return bytes_bt[:, :-1], bytes_bt[:, 1:]


def batches(
    text: torch.Tensor, rank: int, seed: int = SEED
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches, the same ones in every run of a seed."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield windows(text, torch.randint(len(text) - DEMO.block, (BATCH,), generator=generator))


def with_hardened(model: GPT) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(model, backend="hardened")


def with_ddp(model: GPT) -> Callable[[torch.Tensor], torch.Tensor]:
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = False
    return torch.nn.parallel.DistributedDataParallel(torch.compile(model, backend="inductor"))


def train(wrap: Wrap, steps: int, report: Callable[[Any], None], seed: int = SEED) -> None:
    """Train, reporting `StepDone` and `HeldOut` on the way and a `Record` at the end."""
    text, held_out_text = standard_library()
    torch.manual_seed(seed)
    model = GPT(DEMO)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    losses, norms, seconds, total_bytes = [], [], [], 0
    held_out = [HeldOut(0, held_out_loss(model, held_out_text), 0)]
    report(held_out[-1])
    for step, (tokens_bt, targets_bt) in zip(
        range(1, steps + 1), batches(text, dist.get_rank(), seed), strict=False
    ):
        start = time.perf_counter()
        optimizer.param_groups[0]["lr"] = PEAK_LEARNING_RATE * min(1.0, step / WARM_UP_STEPS)
        losses.append(train_step(wrapped, optimizer, tokens_bt, targets_bt))
        seconds.append(time.perf_counter() - start)
        total_bytes += reduced_bytes(model, wrapped)
        report(StepDone(step, losses[-1], seconds[-1]))
        if step <= FIRST_STEPS:
            norms.append(gradient_norm(model))
        if step % HELD_OUT_EVERY == 0 or step == steps:
            loss = held_out_loss(model, held_out_text)
            held_out.append(HeldOut(step, loss, total_bytes))
            report(held_out[-1])
    report(
        Record(
            losses_sr=_of_all_ranks(losses),
            gradient_norms_s=np.array(norms),
            seconds_s=np.array(seconds),
            held_out=tuple(held_out),
            reduced_bytes=total_bytes / steps,
        )
    )


def train_step(
    wrapped: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    tokens_bt: torch.Tensor,
    targets_bt: torch.Tensor,
) -> float:
    """One step; returns the loss of this rank's batch before it. Gradients stay behind."""
    optimizer.zero_grad()
    logits_btv = wrapped(tokens_bt)
    loss = F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def gradient_norm(model: GPT) -> float:
    """AdamW follows a gradient that is twice too large just as well: losses would not show that."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


@torch.no_grad()
def held_out_loss(model: GPT, text: torch.Tensor) -> float:
    """Mean loss over fixed windows, shared out among the ranks; eager, so no backend is in it."""
    last = len(text) - DEMO.block - 1
    starts = torch.linspace(0, last, HELD_OUT_WINDOWS, dtype=torch.float64).long()
    total = torch.zeros((), dtype=torch.float64)
    for starts_b in starts[dist.get_rank() :: RANKS].split(16):
        tokens_bt, targets_bt = windows(text, starts_b)
        logits_btv = model(tokens_bt)
        total += F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten(), reduction="sum")
    dist.all_reduce(total)
    return total.item() / (HELD_OUT_WINDOWS * DEMO.block)


def reduced_bytes(model: GPT, wrapped: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Payload bytes that this rank handed to collectives in the last step."""
    if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
        # DDP keeps no count of its own: it reduces every gradient once.
        return sum(p.numel() * p.element_size() for p in model.parameters())
    import fxpasses

    return fxpasses.runtime(model).last_step.bytes


def _of_all_ranks(losses: list[float]) -> np.ndarray:
    """(steps, ranks)"""
    mine = torch.tensor(losses, dtype=torch.float64)
    parts = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(parts, mine)
    return torch.stack(parts, dim=1).numpy()
