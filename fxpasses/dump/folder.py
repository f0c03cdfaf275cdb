"""The dump: an observer that writes the graph into a folder after each pass.

    FOLDER/00-input.py  .json  .dot
    FOLDER/03-compress.py  .diff  .json  .dot      the third pass of the pipeline

Names hold no clock and no process id, so that two runs write the same files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fxpasses.dump.diff import unified
from fxpasses.dump.dot import DotLines
from fxpasses.dump.serial import Records
from fxpasses.dump.text import Lines, file_text, preamble
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Done


class Dump:
    """Writes a graph before the first pass and after each one, then with what is different."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines, self._records, self._dot = Lines(), Records(), DotLines()
        self._number = 0
        self._last: _Written | None = None

    def __call__(self, previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        lines, last = self._lines.of(graph), self._last
        if previous is None and last is not None and lines == last.lines:
            return  # the passes go on where they stopped
        self._number = previous.number if previous else self._number
        name = previous.made_by.name if previous else ("prepared" if last else "input")
        names = frozenset(node.name for node in graph.graph.nodes)
        now = _Written(f"{self._number:02d}-{name}", preamble(previous, graph), lines, names)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write(now, "py", file_text(now.preamble, graph, lines))
        self._write(now, "json", self._records.text(previous, graph))
        new = names - last.names if last else frozenset()
        self._write(now, "dot", "\n".join([*self._dot.of(graph, new), ""]))
        if last is not None:
            self._write(now, "diff", "".join(f"{line}\n" for line in last.diff(now)))
        self._last = now

    def _write(self, written: _Written, suffix: str, text: str) -> None:
        (self._folder / f"{written.stem}.{suffix}").write_text(text)


@dataclasses.dataclass(frozen=True)
class _Written:
    """What the files of one moment say."""

    stem: str
    preamble: list[str]
    lines: list[str]
    names: frozenset[str]

    def diff(self, later: _Written) -> list[str]:
        skip = len(self.preamble), len(later.preamble)
        return unified(self.lines, later.lines, (f"{self.stem}.py", f"{later.stem}.py"), skip)
