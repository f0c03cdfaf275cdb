"""What `fxpasses dump` prints while passes run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from fxpasses.cli.errors import InputError
from fxpasses.config import nearest

if TYPE_CHECKING:
    from fxpasses.dump.errors import Difference
    from fxpasses.graph import TrainingGraph
    from fxpasses.observers import GraphName
    from fxpasses.passes.base import Pass
    from fxpasses.pipeline import Done, Observer

CHANGES = ("full", "diff", "cdiff", "quiet")
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be printed.

    Attributes:
        graphs: the whole graph after each pass.
        changed: `"full"`: the graph after each pass that changed it; `"diff"`, `"cdiff"`: what changed,
            without and with colours; `"quiet"`: as `"full"`, and nothing of unchanged ones; None: nothing.
        lines: one line a pass.
        before, after: passes around which the whole graph is printed.
        only: passes that are printed; empty: all.
    """

    graphs: bool = False
    changed: str | None = None
    lines: bool = False
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()


class Printer:
    """Watches graphs, prints what is wanted, and remembers figures for `--json` and `--time-passes`."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.graphs: dict[str, list[dict[str, Any]]] = {}
        self.seconds: dict[str, float] = {}

    def watch(self, name: GraphName) -> Observer:
        """The observer of one graph."""
        from fxpasses.dump.text import Lines

        look = _Look(str(name), self._wanted, Lines(), self.graphs.setdefault(str(name), []))

        def observe(previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
            if previous is not None:
                key = previous.made_by.name
                self.seconds[key] = self.seconds.get(key, 0.0) + previous.seconds
            look(previous, following, graph)

        return observe

    def add_errors(self, found: Mapping[tuple[str, int], Difference]) -> None:
        """Add how much results differ behind passes, by graph and number."""
        for (name, number), difference in found.items():
            for row in self.graphs[name]:
                if row["number"] == number:
                    row.update(difference.data())

    def print_errors(self) -> None:
        """How much results differ behind each pass."""
        click.echo(f"{'error':>10} {'change':>10}  pass")
        for name, rows in self.graphs.items():
            for row in rows:
                if "change" in row:
                    error = "unknown" if row["error"] is None else f"{float(row['error']):.2e}"
                    what = f"{name} {row['number']:02d} {row['pass']}"
                    click.echo(f"{error:>10} {float(row['change']):10.2e}  {what}")

    def print_times(self) -> None:
        """Seconds by pass, over all graphs, the longest first."""
        total = sum(self.seconds.values()) or 1.0
        click.echo(f"{'seconds':>10} {'share':>7}  pass")
        for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            click.echo(f"{seconds:10.4f} {seconds / total:7.1%}  {name}")

    def print_json(self, with_times: bool) -> None:
        """All passes and what they did; times, which differ from run to run, only if asked for."""
        graphs = [{"name": name, "passes": passes} for name, passes in self.graphs.items()]
        times = {"seconds": self.seconds} if with_times else {}
        click.echo(json.dumps({"graphs": graphs, **times}, indent=2))


class _Look:
    """Prints one graph."""

    def __init__(self, name: str, wanted: Wanted, lines: Any, rows: list[dict[str, Any]]) -> None:
        self._name, self._wanted, self._lines, self._rows = name, wanted, lines, rows
        self._last: list[str] = []
        self._stem = "00-input"
        self._nodes: list[str] = []

    def __call__(self, previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        lines = self._lines.of(graph)
        if previous is not None:
            self._note(previous, graph)
            self._print(previous, graph, lines)
        elif self._wanted.graphs and not self._last:
            self._print_graph(None, graph, lines)
        if following is not None and following.name in self._wanted.before:
            click.echo(f"# {self._name} before {following.spec}")
            click.echo("\n".join(lines))
        self._last, self._nodes = lines, [node.name for node in graph.graph.nodes]

    def _note(self, done: Done, graph: TrainingGraph) -> None:
        now = [node.name for node in graph.graph.nodes]
        old, new = set(self._nodes), set(now)
        self._rows.append(
            {
                "number": done.number,
                "pass": done.made_by.spec,
                "changed": done.report.changed,
                "counts": done.report.counts,
                "nodes": len(now),
                "added": [name for name in now if name not in old],
                "removed": [name for name in self._nodes if name not in new],
            }
        )

    def _print(self, done: Done, graph: TrainingGraph, lines: list[str]) -> None:
        name, wanted = done.made_by.name, self._wanted
        stem, self._stem = self._stem, f"{done.number:02d}-{name}"
        if name in wanted.after:
            self._print_graph(done, graph, lines)
        if wanted.only and name not in wanted.only:
            return
        if wanted.graphs:
            self._print_graph(done, graph, lines)
        elif wanted.changed is None:
            if wanted.lines:
                click.echo(self._line(done))
        elif not done.report.changed:
            if wanted.changed != "quiet":
                click.echo(self._line(done))
        elif wanted.changed in ("diff", "cdiff"):
            click.echo(self._line(done))
            self._print_diff(lines, stem)
        else:
            self._print_graph(done, graph, lines)

    def _line(self, done: Done) -> str:
        from fxpasses.dump.text import heading

        row = self._rows[-1]
        edits = f" (+{len(row['added'])} -{len(row['removed'])} nodes)" if row["changed"] else ""
        said = heading(done).removeprefix("# after ")
        return f"{self._name} {done.number:02d} {said}{edits}"

    def _print_graph(self, done: Done | None, graph: TrainingGraph, lines: list[str]) -> None:
        from fxpasses.dump.text import heading

        click.echo(f"# {self._name}\n{heading(done)}")
        click.echo("\n".join(lines))

    def _print_diff(self, lines: list[str], stem: str) -> None:
        from fxpasses.dump.diff import unified

        for line in unified(self._last, lines, (stem, self._stem)):
            colour = _COLOURS.get(line[0]) if self._wanted.changed == "cdiff" else None
            click.echo(click.style(line, fg=colour) if colour else line, color=coloured())


def coloured() -> bool | None:
    """Whether colours are written: never with NO_COLOR in the environment, else where a terminal shows them."""
    return False if os.environ.get("NO_COLOR") else None


def known_passes(names: Iterable[str], option: str) -> frozenset[str]:
    """Names of passes from options that may be given several times, and hold several each.

    Raises:
        InputError: for a name that no pass has.
    """
    from fxpasses.registry import passes

    found = [name.strip() for text in names for name in text.split(",") if name.strip()]
    known: Collection[str] = passes()
    for name in found:
        if name not in known:
            raise InputError(f"option {option!r}: unknown pass {name!r}{nearest(name, known)}")
    return frozenset(found)
