"""Train a small GPT on two ranks with the hardened backend and again under DDP, and compare.

    python -m bench.demo [--steps 300] [--output demo-output]

Two processes, gloo over loopback, one thread each. The text is Python's own standard library, byte
by byte. Both runs have the same initial weights, batches and evaluation. Exit status 0: the losses
agree; 1: they don't, or a rank failed; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.comparison import Comparison, plot
from bench.gpt import DEMO, GPT, parameter_count
from bench.ranks import RankFailed, run_ranks
from bench.training import (
    BATCH,
    RANKS,
    UNTIMED_STEPS,
    HeldOut,
    Record,
    StepDone,
    Wrap,
    standard_library,
    with_ddp,
    with_hardened,
)


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
