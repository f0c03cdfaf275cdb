"""Both runs of the demo side by side: bounds, table and plot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from rich.table import Table

from bench.gpt import DEMO, GPT, parameter_count
from bench.training import FIRST_STEPS, RANKS, Record

FIRST_STEPS_BOUND = 1e-5
FINAL_LOSS_BOUND = 0.002  # relative
GRADIENT_NORM_BOUND = 0.01  # relative, over the first steps


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
            *(f"{record.reduced_bytes:,.0f}" for record in both),
            f"ratio {bytes_ratio:.4f}",
        )
        return table
