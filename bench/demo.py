"""Train a small GPT on two ranks with the hardened backend and again under DDP, and compare.

    python -m bench.demo [--steps 300] [--output demo-output]

Two processes, gloo over loopback, one thread each. The text is Python's own standard library, byte
by byte. Both runs have the same initial weights, batches and evaluation. Exit status 0: the losses
agree; 1: they don't, or a rank failed; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.multiprocessing.spawn import ProcessContext, start_processes

from bench.gpt import DEMO, GPT, parameter_count

RANKS = 2
SEED = 0
BATCH = 4  # sequences of a rank and step
PEAK_LEARNING_RATE = 5e-4
WARM_UP_STEPS = 30
HELD_OUT_WINDOWS = 128
HELD_OUT_EVERY = 50  # steps
UNTIMED_STEPS = 5  # compilation and first touches of memory

FIRST_STEPS, FIRST_STEPS_BOUND = 20, 1e-5
FINAL_LOSS_BOUND = 0.002  # relative
GRADIENT_NORM_BOUND = 0.01  # relative, over the first steps

START_TIMEOUT_S = 120
COLLECTIVE_TIMEOUT_S = 300  # one rank may wait for the other's compilation
STALL_TIMEOUT_S = 360  # beyond a rank's own timeouts, whose messages say more
STOP_TIMEOUT_S = 10

Wrap = Callable[[GPT], Callable[[torch.Tensor], torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class StepDone:
    """Rank 0 finished a step (counted from 1): its own batch's loss, the step's seconds."""

    step: int
    loss: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out loss in nats per byte after a number of steps."""

    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run leaves behind.

    Attributes:
        losses_sr: training loss of each step and rank.
        gradient_norms_s: norm of the reduced gradient, all parameters together, of the first steps.
        seconds_s: duration of each step on rank 0.
        held_out: losses in the order of their steps.
        reduced_bytes: payload bytes that a rank hands to collectives in a step.
    """

    losses_sr: np.ndarray
    gradient_norms_s: np.ndarray
    seconds_s: np.ndarray
    held_out: tuple[HeldOut, ...]
    reduced_bytes: int

    def quartiles_ms(self) -> tuple[float, float, float]:
        """Of the step times, without the first ones."""
        timed_s = self.seconds_s[min(UNTIMED_STEPS, len(self.seconds_s) - 1) :]
        low, median, high = np.percentile(timed_s, (25, 50, 75)) * 1e3
        return low, median, high


# The text


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


def batches(text: torch.Tensor, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches, the same ones in every run."""
    generator = torch.Generator().manual_seed(1000 * SEED + rank)
    while True:
        yield windows(text, torch.randint(len(text) - DEMO.block, (BATCH,), generator=generator))


# Training, on each rank


def with_hardened(model: GPT) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(model, backend="hardened")


def with_ddp(model: GPT) -> Callable[[torch.Tensor], torch.Tensor]:
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = False
    return torch.nn.parallel.DistributedDataParallel(torch.compile(model, backend="inductor"))


def train(wrap: Wrap, steps: int, report: Callable[[Any], None]) -> None:
    """Train, reporting `StepDone` and `HeldOut` on the way and a `Record` at the end."""
    text, held_out_text = standard_library()
    # Nothing broadcasts rank 0's weights to the others: every rank draws the same.
    torch.manual_seed(SEED)
    model = GPT(DEMO)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    losses, norms, seconds = [], [], []
    held_out = [HeldOut(0, held_out_loss(model, held_out_text))]
    report(held_out[-1])
    for step, (tokens_bt, targets_bt) in zip(
        range(1, steps + 1), batches(text, dist.get_rank()), strict=False
    ):
        start = time.perf_counter()
        optimizer.param_groups[0]["lr"] = PEAK_LEARNING_RATE * min(1.0, step / WARM_UP_STEPS)
        losses.append(train_step(wrapped, optimizer, tokens_bt, targets_bt))
        seconds.append(time.perf_counter() - start)
        report(StepDone(step, losses[-1], seconds[-1]))
        if step <= FIRST_STEPS:
            norms.append(gradient_norm(model))
        if step % HELD_OUT_EVERY == 0 or step == steps:
            held_out.append(HeldOut(step, held_out_loss(model, held_out_text)))
            report(held_out[-1])
    report(
        Record(
            losses_sr=_of_all_ranks(losses),
            gradient_norms_s=np.array(norms),
            seconds_s=np.array(seconds),
            held_out=tuple(held_out),
            reduced_bytes=reduced_bytes(model, wrapped),
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


# Ranks: started, watched and stopped by the parent process


class RankFailed(Exception):
    """Argument: for each failed rank its traceback, or how else it ended."""


def run_rank(rank: int, wrap: Wrap, steps: int, port: int, reports: Connection) -> None:
    """Body of one rank's process. Only rank 0 reports."""
    # A group of its own: Ctrl-C reaches the parent alone, which then ends this process together
    # with any compiler that it has started.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    _compile_in_this_process()
    meet(rank, port)
    try:
        train(wrap, steps, reports.send if rank == 0 else lambda _: None)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        others = ", ".join(str(other) for other in range(RANKS) if other != rank)
        raise TimeoutError(
            f"rank {rank} waited {COLLECTIVE_TIMEOUT_S} s in a collective for rank {others}"
        ) from error
    dist.destroy_process_group()


def _compile_in_this_process() -> None:
    """No pool of compiler processes: each rank has one core."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


def meet(rank: int, port: int) -> None:
    """Make the default process group once every rank is there."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    start_timeout = timedelta(seconds=START_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=start_timeout)
    store.set(f"rank {rank}", "here")
    for other in range(RANKS):
        try:
            store.wait([f"rank {other}"], start_timeout)
        except dist.DistStoreError as error:
            raise TimeoutError(
                f"rank {rank} waited {START_TIMEOUT_S} s for rank {other} to start"
            ) from error
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)


def run_ranks(wrap: Wrap, steps: int, on_report: Callable[[Any], None]) -> None:
    """Run all ranks to their end; however this is left, none of them lives on.

    Raises:
        RankFailed: a rank failed; the others have been stopped.
        TimeoutError: nothing was heard of rank 0 for too long.
    """
    # Port 0, a free one of the system's choice: picking one first would leave time to lose it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reports, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    try:
        with _interrupts_ignored():
            # Ranks inherit this until they are set up: no tracebacks from half-done imports.
            ranks = start_processes(
                run_rank, (wrap, steps, store.port, sender), RANKS, join=False, start_method="spawn"
            )
        sender.close()
        _watch(ranks, reports, on_report)
    finally:
        with _interrupts_ignored():
            _stop_ranks()
        reports.close()


def _watch(ranks: ProcessContext, reports: Connection, on_report: Callable[[Any], None]) -> None:
    heard = time.monotonic()
    with contextlib.suppress(EOFError):  # the end of the pipe: every rank has ended
        while True:
            if reports.poll(0.2):
                on_report(reports.recv())
                heard = time.monotonic()
            _check(ranks)
            if time.monotonic() - heard > STALL_TIMEOUT_S:
                raise TimeoutError(f"waited {STALL_TIMEOUT_S} s for a report of rank 0")
    for rank, process in enumerate(ranks.processes):
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            raise TimeoutError(f"waited {STOP_TIMEOUT_S} s for rank {rank} to exit")
    _check(ranks)


def _check(ranks: ProcessContext) -> None:
    failed = [rank for rank, process in enumerate(ranks.processes) if process.exitcode]
    if failed:
        last_words = {rank: _last_words(ranks, rank) for rank in failed}
        # Not left to ProcessContext.join: it would leave the compilers of the others running.
        _stop_ranks()
        raise RankFailed(last_words)


def _last_words(ranks: ProcessContext, rank: int) -> str:
    exitcode, error_file = ranks.processes[rank].exitcode, Path(ranks.error_files[rank])
    if error_file.exists():
        return pickle.loads(error_file.read_bytes()).strip()
    if exitcode < 0:
        return f"ended by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def _stop_ranks() -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        alive = multiprocessing.active_children()
        for process in alive:
            _signal_group(process.pid, sign)
        for process in alive:
            process.join(STOP_TIMEOUT_S)


def _signal_group(pid: int | None, sign: signal.Signals) -> None:
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, sign)
        except ProcessLookupError:  # it has not got as far as making its group
            os.kill(pid, sign)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


# Showing


def run_shown(title: str, wrap: Wrap, steps: int, console: Console) -> Record:
    """One run behind a progress bar."""
    records: list[Record] = []
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=steps, status="starting")

        def on_report(report: Any) -> None:
            if isinstance(report, StepDone):
                status = f"loss {report.loss:.4f}  {report.seconds * 1e3:.0f} ms a step"
                progress.update(bar, completed=report.step, status=status)
            elif isinstance(report, HeldOut):
                console.print(f"{title:<9} step {report.step:>4}  held-out loss {report.loss:.4f}")
                if report.step == 0:
                    progress.update(bar, status="compiling")
            else:
                records.append(report)

        run_ranks(wrap, steps, on_report)
    return records[0]


def plot(ours: Record, ddp: Record, path: Path) -> None:
    """Loss curves of both runs, one over the other, with their held-out losses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    looks = [("hardened", ours, "tab:blue", "-", 3.0), ("DDP", ddp, "tab:orange", "--", 1.2)]
    for title, record, colour, dashes, width in looks:
        steps_s = np.arange(1, len(record.losses_sr) + 1)
        mean_s = record.losses_sr.mean(axis=1)
        axes.plot(steps_s, mean_s, dashes, color=colour, linewidth=width, alpha=0.5, label=title)
        at, losses = zip(*((h.step, h.loss) for h in record.held_out), strict=True)
        label = f"{title}, held out"
        dots = axes.scatter(at, losses, s=30 * width, facecolors="none", linewidths=2, zorder=3)
        dots.set(edgecolors=colour, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(f"{parameter_count(GPT(DEMO)):,} parameters, {RANKS} ranks over gloo")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both runs side by side."""

    ours: Record
    ddp: Record

    def first_difference(self) -> float:
        """Largest difference of a loss over the first steps and all ranks."""
        first = slice(FIRST_STEPS)
        return float(np.abs(self.ours.losses_sr[first] - self.ddp.losses_sr[first]).max())

    def final_losses(self) -> tuple[float, float]:
        return self.ours.held_out[-1].loss, self.ddp.held_out[-1].loss

    def final_difference(self) -> float:
        """Relative to DDP's."""
        ours, ddp = self.final_losses()
        return abs(ours - ddp) / ddp

    def gradient_norm_difference(self) -> float:
        """Largest one over the first steps, relative to DDP's."""
        ddp_s = self.ddp.gradient_norms_s
        return float((np.abs(self.ours.gradient_norms_s - ddp_s) / ddp_s).max())

    def failures(self) -> list[str]:
        """A line for each bound that is broken; a NaN breaks it."""
        lines = []
        if not self.first_difference() <= FIRST_STEPS_BOUND:
            lines.append(
                f"losses of the first {FIRST_STEPS} steps differ by {self.first_difference():.2e}, "
                f"more than {FIRST_STEPS_BOUND:.0e}"
            )
        if not self.gradient_norm_difference() <= GRADIENT_NORM_BOUND:
            lines.append(
                f"gradient norms of the first {FIRST_STEPS} steps differ by "
                f"{self.gradient_norm_difference():.2%}, more than {GRADIENT_NORM_BOUND:.0%}"
            )
        if not self.final_difference() <= FINAL_LOSS_BOUND:
            ours, ddp = self.final_losses()
            lines.append(
                f"final held-out losses {ours:.4f} (hardened) and {ddp:.4f} (DDP) differ by "
                f"{self.final_difference():.3%}, more than {FINAL_LOSS_BOUND:.1%}"
            )
        return lines

    def table(self) -> Table:
        both = (self.ours, self.ddp)
        quartiles = [record.quartiles_ms() for record in both]
        bytes_ratio = self.ours.reduced_bytes / self.ddp.reduced_bytes
        first = min(FIRST_STEPS, len(self.ours.losses_sr))
        table = Table("", "hardened", "DDP", "difference", "bound")
        table.add_row(
            f"loss, first {first} steps",
            *(f"{record.losses_sr[:first].mean():.4f}" for record in both),
            f"max {self.first_difference():.1e}",
            f"{FIRST_STEPS_BOUND:.0e}",
        )
        table.add_row(
            f"gradient norm, first {first}",
            *(f"{record.gradient_norms_s.mean():.4f}" for record in both),
            f"max {self.gradient_norm_difference():.2%}",
            f"{GRADIENT_NORM_BOUND:.0%}",
        )
        table.add_row(
            "held-out loss, end",
            *(f"{loss:.4f}" for loss in self.final_losses()),
            f"{self.final_difference():.4%}",
            f"{FINAL_LOSS_BOUND:.1%}",
        )
        table.add_row(
            "step time, median",
            *(f"{median:.1f} ms" for _, median, _ in quartiles),
            f"ratio {quartiles[0][1] / quartiles[1][1]:.3f}",
        )
        table.add_row(
            "step time, quartiles", *(f"{low:.0f}, {high:.0f} ms" for low, _, high in quartiles)
        )
        table.add_row("first step, compiling", *(f"{r.seconds_s[0]:.1f} s" for r in both))
        table.add_row(
            "bytes reduced a step",
            *(f"{record.reduced_bytes:,}" for record in both),
            f"ratio {bytes_ratio:.4f}",
        )
        return table


# The command


def demo(steps: int, folder: Path, console: Console) -> int:
    """Both runs, the plot and the table; returns the exit status."""
    start = time.monotonic()
    train_text, held_out_text = standard_library()
    console.print(
        f"{parameter_count(GPT(DEMO)):,} parameters; {len(train_text) / 1e6:.1f} MB of text, "
        f"{len(held_out_text) / 1e6:.1f} MB held out; {RANKS} ranks, "
        f"{BATCH} x {DEMO.block} bytes a rank and step"
    )
    ours = run_shown("hardened", with_hardened, steps, console)
    ddp = run_shown("DDP", with_ddp, steps, console)
    plot(ours, ddp, folder / "loss.png")
    comparison = Comparison(ours, ddp)
    console.print(comparison.table())
    console.print(
        "First steps: means, and the largest difference in any step (losses: on any rank). "
        f"Step times leave out the first {UNTIMED_STEPS} steps. The runs came one after the other: "
        "whatever else ran on this machine shows in their ratio, and the second one compiles with "
        "a warmer cache."
    )
    console.print(f"Plot: {folder / 'loss.png'}. Took {time.monotonic() - start:.0f} s.")
    failures = comparison.failures()
    for line in failures:
        console.print(f"FAILED: {line}", style="bold red")
    return 1 if failures else 0


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=_positive, default=300, help="of each run (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for the plot"
    )
    args = parser.parse_args()
    console = Console()
    # A started job may have it ignored; and SIGTERM shall run the same clean-up.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return demo(args.steps, args.output, console)
    except KeyboardInterrupt:
        console.print("Interrupted; all ranks are stopped.")
        return 128 + signal.SIGINT
    except RankFailed as failure:
        (last_words,) = failure.args
        for rank, words in last_words.items():
            print(f"rank {rank}: {words}", file=sys.stderr)
        which = " and ".join(f"rank {rank}" for rank in last_words)
        console.print(f"FAILED: {which} (see above); all ranks are stopped.", style="red")
        return 1
    except TimeoutError as error:
        console.print(f"FAILED: {error}; all ranks are stopped.", style="red")
        return 1


if __name__ == "__main__":
    sys.exit(main())
