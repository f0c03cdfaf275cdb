"""Running a part of the passes, and a part of what one of them writes: what `fxpasses bisect` asks for.

It asks through the environment, so that any command can be asked about, whatever processes it starts:

    FXPASSES_BISECT={"log": FILE, "passes": [names] or null, "partial": [name, rewrites] or null}

Only these passes run (null: all), and of one only so many rewrites happen; then it is left as if it had ended.
A rewrite is a call of `splice`, or what a pass asks for with `rewrite.wanted`. Each process adds what it ran
to the log. A graph that a pass left half-way may break a rule: that is noted as well, since it says nothing
about the pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass, Report
from fxpasses.rewrite import Provenance, listening

VARIABLE = "FXPASSES_BISECT"


@dataclasses.dataclass(frozen=True)
class Request:
    """What the environment asks for.

    Attributes:
        log: file that each process adds lines to.
        passes: names of those that run; None: all.
        partial: a pass, and how many of its rewrites happen.
    """

    log: str
    passes: tuple[str, ...] | None = None
    partial: tuple[str, int] | None = None

    def environment(self) -> dict[str, str]:
        """The variable that asks for it."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def note(self, **row: Any) -> None:
        """Add a line to the log; several processes may do so at once."""
        with open(self.log, "a") as file:
            file.write(json.dumps({"process": os.getpid(), **row}) + "\n")


class _Stop(BaseException):
    """Ends a pass half-way: not an `Exception`, which the pass might handle."""


_counts: Counter[str] = Counter()  # rewrites by pass, over all graphs of this process


def chosen(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Those passes that run."""
    request = _request()
    if request is None:
        return tuple(passes)
    request.note(pipeline=[p.name for p in passes])
    return tuple(p for p in passes if request.passes is None or p.name in request.passes)


def run(current: Pass, graph: TrainingGraph) -> Report:
    """Run a pass, or a part of it."""
    request = _request()
    if request is None:
        return current.run_checked(graph)
    before = graph.fingerprint()
    try:
        with listening(_Part(request, current.name)):
            return current.run_checked(graph)
    except _Stop:
        return Report(changed=graph.fingerprint() != before)


class _Part:
    """Lets a pass do as many rewrites as the request says."""

    def __init__(self, request: Request, name: str) -> None:
        self._request, self._name = request, name
        partial = request.partial
        self._limit = partial[1] if partial and partial[0] == name else None
        self._asks = False  # whether the pass asks itself; then splices are no rewrites

    def before_splice(self, provenance: Provenance) -> None:
        if not self._asks and not self._next(provenance):
            raise _Stop

    def wants(self, provenance: Provenance) -> bool:
        self._asks = True
        return self._next(provenance)

    def _next(self, provenance: Provenance) -> bool:
        if self._limit is not None and _counts[self._name] >= self._limit:
            return False
        _counts[self._name] += 1
        self._request.note(made_by=self._name, rewrite=dataclasses.asdict(provenance))
        return True


@contextlib.contextmanager
def noting_untestable(previous: Pass | None) -> Iterator[None]:
    """Note an error that is raised behind a pass which was left half-way."""
    request = _request()
    partial = request and previous and request.partial and request.partial[0] == previous.name
    try:
        yield
    except Exception as error:
        if request is not None and partial:
            request.note(untestable=str(error))
        raise


def _request() -> Request | None:
    text = os.environ.get(VARIABLE)
    return _read(text) if text else None


@functools.cache
def _read(text: str) -> Request:
    data = json.loads(text)
    passes, partial = data["passes"], data["partial"]
    return Request(
        data["log"],
        None if passes is None else tuple(passes),
        None if partial is None else (partial[0], partial[1]),
    )
