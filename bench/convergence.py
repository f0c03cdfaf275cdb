"""Train the demo's language model with compressed gradients, beside dense ones: held-out loss and bytes.

    python -m bench.convergence [--seeds 3] [--steps 300] [--schemes none int8 ...] [--output FOLDER] [--keep]

Two ranks over gloo; equal steps, initial weights and batches for all schemes of a seed. Differences are taken
seed by seed. A run that is there already (a file in the output folder) is not repeated; delete it to do so.
`--keep` also writes table and plot to bench/results.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import RESULTS
from bench.gpt import GPT
from bench.ranks import run_ranks
from bench.training import HeldOut, Record

EMBEDDINGS = ("tokens.weight", "positions.weight")
SCHEMES: dict[str, Any] = {
    "none": "none",
    "int8": "int8",
    "int4": "int4",
    "topk": {"scheme": "topk", "ratio": 0.01},
    "topk-warmup": {"scheme": "topk", "ratio": 0.01, "warmup": 100},
    "topk-ef21": {"scheme": "topk", "ratio": 0.01, "feedback": "ef21", "momentum": 0.9},
    "powersgd": {"scheme": "powersgd", "rank": 4},
    "adaptive": {
        "*": {"scheme": "adaptive", "rank": 8},
        **dict.fromkeys(EMBEDDINGS, "int4"),
    },
    "budget": {
        "scheme": "adaptive",
        "levels": ["int8", "int4", "topk"],
        "policy": "budget",
        "budget": 0.2,
    },
}
LOSS_GOALS = {"int8": 0.001, "int4": 0.005, "topk": 0.01, "topk-warmup": 0.01}  # relative to dense
FEWER_BYTES_GOAL = 1.5  # adaptive, beside the static scheme of least bytes with no larger loss
ADAPTIVE = ("adaptive", "budget")


def with_compression(compression: Any, model: GPT) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(model, backend="hardened", options={"compression": compression})


def run(scheme: str, seed: int, steps: int, folder: Path, console: Console) -> dict[str, Any]:
    """A run's held-out losses and bytes sent so far, by step, and mean bytes a step and rank."""
    path = folder / f"{scheme}-seed{seed}-steps{steps}.json"
    if not path.exists():
        records: list[Record] = []

        def on_report(report: Any) -> None:
            if isinstance(report, HeldOut):
                console.print(f"{scheme:<9} seed {seed}  step {report.step:>4}  {report.loss:.4f}")
            elif isinstance(report, Record):
                records.append(report)

        wrap = functools.partial(with_compression, SCHEMES[scheme])
        run_ranks(wrap, steps, on_report, seed)
        found = {
            "steps": [h.step for h in records[0].held_out],
            "losses": [h.loss for h in records[0].held_out],
            "sent": [h.sent_bytes for h in records[0].held_out],
            "bytes": records[0].reduced_bytes,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return json.loads(path.read_text())


def table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """A row for each scheme; means over the seeds, and in brackets the largest and smallest difference."""
    result = Table("scheme", "held-out loss", "to dense", "bytes a step", "fewer", "goal")
    dense = [r["losses"][-1] for r in runs["none"]]
    dense_bytes = runs["none"][0]["bytes"]
    for scheme, found in runs.items():
        losses = [r["losses"][-1] for r in found]
        apart = [loss / own - 1 for loss, own in zip(losses, dense, strict=True)]
        sent = statistics.mean(r["bytes"] for r in found)
        spread = f"({min(apart):+.2%} to {max(apart):+.2%})"
        result.add_row(
            scheme,
            f"{statistics.mean(losses):.4f}",
            f"{statistics.mean(apart):+.2%} {spread}",
            f"{sent:,.0f}",
            f"{dense_bytes / sent:.1f}x",
            _goal(scheme, statistics.mean(apart), runs),
        )
    return result


def _goal(scheme: str, apart: float, runs: dict[str, list[dict[str, Any]]]) -> str:
    if scheme in LOSS_GOALS:
        return f"<= {LOSS_GOALS[scheme]:.1%}: {'met' if apart <= LOSS_GOALS[scheme] else 'missed'}"
    if scheme not in ADAPTIVE:
        return ""

    def mean(name: str, of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.mean(of(r) for r in runs[name])

    own_loss = mean(scheme, lambda r: r["losses"][-1])
    rivals = [
        name
        for name in runs
        if name not in ADAPTIVE and mean(name, lambda r: r["losses"][-1]) <= own_loss
    ]
    if not rivals:
        return "no static scheme has as small a loss"
    best = min(rivals, key=lambda name: mean(name, lambda r: r["bytes"]))
    fewer = mean(best, lambda r: r["bytes"]) / mean(scheme, lambda r: r["bytes"])
    verdict = "met" if fewer >= FEWER_BYTES_GOAL else "missed"
    return f"{fewer:.2f}x fewer than {best} (>= {FEWER_BYTES_GOAL:g}): {verdict}"


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Held-out loss over bytes sent, a line for each scheme, the mean over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for scheme, found in runs.items():
        steps = found[0]["steps"]
        losses = [
            statistics.mean(column) for column in zip(*(r["losses"] for r in found), strict=True)
        ]
        by_step.plot(steps, losses, label=scheme)
        sent = [statistics.mean(c) / 1e6 for c in zip(*(r["sent"] for r in found), strict=True)]
        by_bytes.plot(sent[1:], losses[1:], label=scheme)
    by_step.set(xlabel="step", ylabel="held-out loss (nats per byte)")
    by_bytes.set(xlabel="MB sent by a rank", xscale="log")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    by_step.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--output", type=Path, default=Path("convergence-output"))
    parser.add_argument("--keep", action="store_true", help="write to bench/results")
    args = parser.parse_args()
    console = Console(width=120)
    names = dict.fromkeys(("none", *args.schemes))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(args.seeds):
        for name in names:
            runs[name].append(run(name, seed, args.steps, args.output, console))
    console.print(table(runs))
    plot(runs, args.output / "convergence.png")
    console.print(f"Plot: {args.output / 'convergence.png'}")
    if args.keep:
        with (RESULTS / "convergence.txt").open("w") as file:
            Console(width=120, file=file).print(table(runs))
        plot(runs, RESULTS / "convergence.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
