"""Whoever looks on while `fxpasses dump` runs passes: what prints, writes files, draws, measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpasses.cli.printing import Printer, Wanted, known_passes

if TYPE_CHECKING:
    from fxpasses.dump.errors import Errors
    from fxpasses.dump.page import Page
    from fxpasses.graph import TrainingGraph
    from fxpasses.observers import GraphName
    from fxpasses.passes.base import Pass
    from fxpasses.pipeline import Done, Observer

Watch = Callable[["GraphName"], "Observer"]


@dataclasses.dataclass(frozen=True)
class Shown:
    """What is asked for, as on the command line.

    Attributes:
        out, html, svg: where files, the page and drawings go.
        svg_nodes: boxes that a drawing may have.
        changed: as for `Wanted`.
        only, before, after: names of passes; each may hold several.
        times, errors: of each pass.
        as_json: print nothing but what passes did, as JSON.
    """

    out: Path | None
    html: Path | None
    svg: Path | None
    svg_nodes: int
    changed: str | None
    only: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    times: bool
    errors: bool
    as_json: bool

    @property
    def wanted(self) -> Wanted:
        """What is to be printed.

        Raises:
            InputError: for a name that no pass has.
        """
        files = bool(self.out or self.html or self.svg)
        printed = self.changed or self.before or self.after or self.times or self.errors
        return Wanted(
            changed=None if self.as_json else self.changed,
            lines=files and not self.as_json,
            before=known_passes(self.before, "--print-before"),
            after=known_passes(self.after, "--print-after"),
            only=known_passes(self.only, "--filter-passes"),
            graphs=not (files or printed or self.as_json),
        )


class Onlookers:
    """Makes the observers of each graph, and ends their work.

    Args:
        settings: options of the backend.
    """

    def __init__(self, shown: Shown, settings: Mapping[str, Any]) -> None:
        self._shown = shown
        self._printer = Printer(shown.wanted)
        self._page = _page(settings) if shown.html is not None else None
        self._errors = _errors() if shown.errors else None
        looking = (self._printer, self._page, self._errors)
        self._watches: list[Watch] = [one.watch for one in looking if one is not None]
        if shown.out is not None:
            self._watches.append(_written(shown.out))
        if shown.svg is not None:
            self._watches.append(_drawn(shown.svg, shown.svg_nodes))
        self._watches.append(_reproduced(shown.out))

    def watch(self, name: GraphName) -> list[Observer]:
        """The observers of a graph."""
        return [watch(name) for watch in self._watches]

    def finish(self) -> None:
        """Measure, write and print what is known only when all passes are over."""
        shown, printer, page = self._shown, self._printer, self._page
        if self._errors is not None:
            found = self._errors.measured()
            printer.add_errors(found)
            if page is not None:
                page.add_errors(found)
        if shown.html is not None and page is not None:
            shown.html.parent.mkdir(parents=True, exist_ok=True)
            shown.html.write_text(page.html())
        if shown.as_json:
            printer.print_json(shown.times)
            return
        if shown.times:
            printer.print_times()
        if shown.errors:
            printer.print_errors()


def _page(settings: Mapping[str, Any]) -> Page:
    from fxpasses.config import Hardening
    from fxpasses.dump.page import Page
    from fxpasses.schedule.machine import Machine

    return Page(Machine.parse(Hardening.from_options(settings).machine))


def _errors() -> Errors:
    from fxpasses.dump.errors import Errors

    return Errors()


def _written(out: Path) -> Watch:
    """Makes observers that write a graph's files."""

    def watch(name: GraphName) -> Observer:
        from fxpasses.dump.folder import Dump

        return Dump(out / str(name))

    return watch


def _reproduced(out: Path | None) -> Watch:
    """Makes observers that leave a script when a pass fails."""

    def watch(name: GraphName) -> Observer:
        from fxpasses.dump.repro import Repro

        path = Path("fxpasses-repro.py") if out is None else out / str(name) / "repro.py"
        return Repro(path, str(name))

    return watch


def _drawn(folder: Path, limit: int) -> Watch:
    """Makes observers that draw a graph once its last pass has run."""
    from fxpasses.dump.modules import graphviz, svg

    graphviz()  # before anything runs

    def watch(name: GraphName) -> Observer:
        path = folder / f"{name}.svg"

        def observe(previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
            if following is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(svg(graph, limit))

        return observe

    return watch
