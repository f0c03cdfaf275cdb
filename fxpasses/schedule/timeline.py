"""A schedule to look at: slices on three tracks a rank, as a table, as Chrome JSON, as a picture.

The JSON is read by Perfetto (ui.perfetto.dev) and chrome://tracing: a process for each rank, tracks `compute`,
`codec` and `link`, and arrows from what was sent to its wait and on to what decodes it. The format is Google's
"Trace Event Format".
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxpasses.schedule.build import WAIT, Program
from fxpasses.schedule.tasks import CODEC, COMPUTE, LINK, Schedule

TRACKS = (COMPUTE, CODEC, LINK)
_WITHIN = {LINK: 0.999, WAIT: 1.0}  # of a slice: where arrows start or go through
COLORS = {COMPUTE: "#4c78a8", CODEC: "#f58518", LINK: "#54a24b"}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Something that ran, or will run, for a while.

    Attributes:
        track: `"compute"`, `"codec"` or `"link"`.
        name: what.
        start, duration: seconds.
        kind: as in `Work`.
        bucket: number of the bucket that it is about; None for the model's own computation.
        nodes: names in the graph, in order; empty for what was measured.
    """

    track: str
    name: str
    start: float
    duration: float
    kind: str
    bucket: int | None = None
    nodes: tuple[str, ...] = ()


def predicted(program: Program, schedule: Schedule) -> list[Slice]:
    """The slices of a schedule. A wait is as long as the host stands still for it."""
    numbers: dict[tuple[str, ...], int] = {}
    for work in program.works:
        if work.kind == LINK and work.bucket:
            numbers.setdefault(work.bucket, len(numbers))
    found, host = [], 0.0
    for i in schedule.order:
        work, start, end = program.works[i], schedule.starts[i], schedule.ends[i]
        if work.kind == WAIT:
            start = host
        if work.kind != LINK:
            host = end
        bucket = numbers.get(work.bucket)
        name, nodes = schedule.tasks[i].name, tuple(node.name for node in work.nodes)
        found.append(Slice(work.track, name, start, end - start, work.kind, bucket, nodes))
    return found


def write_trace(path: Path, ranks: Mapping[int, Sequence[Slice]], label: str = "") -> None:
    """Write slices as Chrome JSON.

    Args:
        ranks: the slices of each rank.
        label: stands behind the number of each rank.
    """
    events: list[dict[str, Any]] = []
    for rank, slices in ranks.items():
        events += _names(rank, label)
        events += [_event(rank, one) for one in slices]
        events += _arrows(rank, slices)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(rank: int, label: str) -> list[dict[str, Any]]:
    name = f"rank {rank} {label}".rstrip()
    found = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}]
    for number, track in enumerate(TRACKS):
        args = {"name": track}
        found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": args})
    return found


def _event(rank: int, one: Slice) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": one.name,
        "cat": one.kind,
        "pid": rank,
        "tid": TRACKS.index(one.track),
        "ts": one.start * 1e6,
        "dur": one.duration * 1e6,
        "args": {} if one.bucket is None else {"bucket": one.bucket},
    }


def _arrows(rank: int, slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """From each transfer to its wait, and to the codec behind that, if there is one."""
    found: list[dict[str, Any]] = []
    for number, chain in enumerate(_chains(slices)):
        last = len(chain) - 1
        for place, one in enumerate(chain):
            event = {
                "ph": "s" if place == 0 else "f" if place == last else "t",
                "name": "arrives",
                "cat": "bucket",
                "id": rank * 1_000_000 + number,
                "pid": rank,
                "tid": TRACKS.index(one.track),
                # It binds to the slice around it: just before a transfer's end, at the end of a wait.
                "ts": (one.start + one.duration * _WITHIN.get(one.kind, 0.0)) * 1e6,
            }
            found.append(event | ({"bp": "e"} if place == last else {}))
    return found


def _chains(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Transfer, wait and, where there is one, codec; of each wait."""
    flying: dict[int | None, list[Slice]] = {}
    chains: list[list[Slice]] = []
    waited: dict[int | None, list[Slice]] = {}
    for one in slices:
        if one.kind == LINK:
            flying.setdefault(one.bucket, []).append(one)
        elif one.kind == WAIT and flying.get(one.bucket):
            chain = [flying[one.bucket].pop(0), one]
            chains.append(chain)
            waited[one.bucket] = chain
        elif one.kind == CODEC and one.bucket in waited:
            waited.pop(one.bucket).append(one)
    return chains


def draw(path: Path, ranks: Mapping[int, Sequence[Slice]], title: str = "") -> None:
    """Draw slices as a Gantt chart, a PNG.

    Raises:
        RuntimeError: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("a Gantt chart needs matplotlib: pip install matplotlib") from error
    rows = [(rank, track) for rank in ranks for track in TRACKS]
    figure = Figure(figsize=(12, 1.5 + 0.45 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, (rank, track) in enumerate(rows):
        mine = [s for s in ranks[rank] if s.track == track]
        busy = [(1e3 * s.start, 1e3 * s.duration) for s in mine if s.kind != WAIT]
        waits = [(1e3 * s.start, 1e3 * s.duration) for s in mine if s.kind == WAIT]
        axes.broken_barh(busy, (row - 0.4, 0.8), color=COLORS[track], edgecolor="white", lw=0.3)
        axes.broken_barh(waits, (row - 0.4, 0.8), color="none", edgecolor="#b00000", hatch="///")
        for one in mine:
            if one.kind == LINK and one.bucket is not None:
                middle = 1e3 * (one.start + one.duration / 2)
                axes.text(middle, row, str(one.bucket), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"rank {rank} {track}" for rank, track in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
