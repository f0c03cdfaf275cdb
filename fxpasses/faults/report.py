"""What a campaign found, as a table, a page and a picture."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxpasses.faults.statistics import by, wilson
from fxpasses.faults.trials import MASKED, OUTCOMES, SILENT

VIEWS = (("layer",), ("operator",), ("phase",), ("dtype", "bit"))
Rows = Sequence[Mapping[str, str]]


def shares(rows: Rows, keys: Sequence[str]) -> list[list[str]]:
    """A line for each group: its name, trials, counts of outcomes, and the share of silent ones of those that
    were not masked, with its interval.
    """
    lines = []
    for group, counts in by(rows, keys).items():
        total, silent = counts.total(), counts[SILENT]
        harmful = total - counts[MASKED]
        low, high = wilson(silent, harmful)
        share = (
            f"{silent / harmful:.1%} ({low:.1%} to {high:.1%})" if harmful else "none was harmful"
        )
        lines.append(
            [" ".join(group) or "-", str(total), *(str(counts[o]) for o in OUTCOMES), share]
        )
    return lines


def heading(keys: Sequence[str]) -> list[str]:
    return [" ".join(keys), "trials", *OUTCOMES, "silent, of harmful (95 %)"]


def write_page(rows: Rows, settings: Mapping[str, Any], path: Path, picture: str) -> None:
    """An HTML page that needs nothing but the picture beside it."""
    parts = ["<!doctype html><meta charset=utf-8><title>Fault campaign</title>"]
    parts.append(
        "<style>td,th{padding:2px 8px;text-align:left}tr:nth-child(odd){background:#eee}</style>"
    )
    parts.append("<h1>Fault campaign</h1><p>")
    parts += [f"{html.escape(k)}: {html.escape(str(v))}<br>" for k, v in sorted(settings.items())]
    parts.append(
        f"</p><img src={html.escape(picture, quote=True)!r} alt='shares by layer and bit'>"
    )
    for keys in ((), *VIEWS):
        parts.append(f"<h2>{' and '.join(keys) or 'all'}</h2><table><tr>")
        parts += [f"<th>{html.escape(word)}" for word in heading(keys)]
        for line in shares(rows, keys):
            parts.append("<tr>" + "".join(f"<td>{html.escape(word)}" for word in line))
        parts.append("</table>")
    path.write_text("\n".join(parts))


def write_picture(rows: Rows, path: Path) -> None:
    """A heat map: share of silent corruption by layer and bit (PNG)."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("the heat map needs matplotlib; pip install 'fxpasses[demo]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = by(rows, ("layer", "bit"))
    layers = list(dict.fromkeys(layer for layer, _ in counts))
    bits = sorted(
        {bit for _, bit in counts}, key=lambda b: (not b.isdigit(), int(b) if b.isdigit() else 0, b)
    )
    values = [
        [
            counts[x, b][SILENT] / counts[x, b].total() if (x, b) in counts else float("nan")
            for b in bits
        ]
        for x in layers
    ]
    figure, axes = plt.subplots(figsize=(2 + 0.3 * len(bits), 1.5 + 0.3 * len(layers)))
    image = axes.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="magma_r")
    axes.set_xticks(range(len(bits)), [b or "-" for b in bits], fontsize=7)
    axes.set_yticks(range(len(layers)), [x or "-" for x in layers], fontsize=7)
    axes.set_xlabel("bit")
    axes.set_title("silent corruption, share of trials")
    figure.colorbar(image)
    figure.savefig(path, bbox_inches="tight", dpi=120)
    plt.close(figure)
