"""`fxpasses bisect`: which pass, and which rewrite in it, makes a command fail.

The command is run again and again with a part of the passes (see `fxpasses.bisection`), halving what is left
down to one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpasses.cli.errors import NO, WRONG, Command, InputError
from fxpasses.cli.running import backend_options

if TYPE_CHECKING:
    from fxpasses.bisection import Request

_PATIENCE = 4  # runs that say nothing, after which a pass is taken as one piece


@click.command(cls=Command)
@click.argument("command")
@click.option(
    "--loss-diff",
    type=click.FloatRange(0, min_open=True),
    help="COMMAND is an input of `fxpasses dump`: train it for three steps, and fail if a loss differs by more "
    "than this from that of eager mode, relative to it.",
)
@click.option("--passes", help="With --loss-diff: the passes.")
@backend_options("With --loss-diff: options.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a run of the command may take; one that takes longer fails.",
)
def bisect(
    command: str,
    loss_diff: float | None,
    passes: str | None,
    options: tuple[str, ...],
    timeout: float,
) -> None:
    """Name the first pass, and the first rewrite in it, with which COMMAND fails.

    COMMAND is run by a shell ('pytest tests/test_model.py'); it fails if its exit status is not 0. It has to
    succeed without any pass, so it should not depend on gradients of several ranks being reduced.

    \b
    Exit codes: 0  found
                1  there is nothing to find: it succeeds with all passes, or fails without any
                2  the command line, or what it names, is wrong
    """
    if loss_diff is not None:
        given = [
            *(["--passes", passes] if passes else []),
            *(x for o in options for x in ("-o", o)),
        ]
        own = [sys.executable, "-m", "fxpasses.cli.loss", command, str(loss_diff), *given]
        command = shlex.join(own)
    elif passes or options:
        raise InputError("--passes and --option go with --loss-diff; a command has its own")
    with tempfile.TemporaryDirectory() as folder:
        _search(Runs(command, timeout, Path(folder) / "log", is_own=loss_diff is not None))


def _search(runs: Runs) -> None:
    everything = runs.run()
    if everything.succeeded:
        click.echo(f"it succeeds with all passes: {', '.join(everything.passes) or 'none ran'}")
        raise SystemExit(NO)
    if not everything.passes:
        click.echo(f"it fails, and ran no pass\n{everything.output}")
        raise SystemExit(NO)
    if not runs.run(passes=()).succeeded:
        click.echo(f"it fails without any pass as well\n{everything.output}")
        raise SystemExit(NO)
    names = everything.passes
    bad = first_bad(len(names), lambda n: runs.run(passes=names[:n]).succeeded)[1]
    name = names[bad - 1]
    whole = everything if bad == len(names) else runs.run(passes=names[:bad])
    click.echo(f"first pass: {name} ({bad} of {len(names)}: {', '.join(names)})")
    rewrites = whole.rewrites(name)
    good, end = first_bad(
        len(rewrites), lambda n: runs.run(passes=names[:bad], partial=(name, n)).verdict
    )
    _print_rewrite(rewrites, good, end)


def _print_rewrite(rewrites: list[dict[str, Any]], good: int, bad: int) -> None:
    from fxpasses.dump.code import origin_of
    from fxpasses.rewrite import Provenance

    if not rewrites:
        click.echo("it wrote nothing by a rewrite that could be left out")
        return
    if bad - good > 1:
        span = f"{good + 1} to {bad} of {len(rewrites)}"
        click.echo(f"first rewrite: one of {span}; the pass can't be stopped in between")
    for number in range(good + 1, bad + 1):
        row = rewrites[number - 1]
        origin = Provenance(**{**row, "parameters": tuple(row["parameters"])})
        label = "first rewrite:" if bad - good == 1 else "  "
        click.echo(f"{label} {number} of {len(rewrites)}: {origin_of(origin)}")


def first_bad(count: int, succeeds: Callable[[int], bool | None]) -> tuple[int, int]:
    """The last number that is known to succeed and the first that is known to fail: neighbours, unless it can't
    be told of what lies between.

    Args:
        count: the largest number, which fails; 0 succeeds.
        succeeds: None where it can't be told.
    """
    good, bad = 0, count
    unknown: set[int] = set()
    while len(unknown) < _PATIENCE:
        candidates = [n for n in range(good + 1, bad) if n not in unknown]
        if not candidates:
            break
        middle = min(candidates, key=lambda n: abs(2 * n - good - bad))
        verdict = succeeds(middle)
        if verdict is None:
            unknown.add(middle)
        elif verdict:
            good = middle
        else:
            bad = middle
    return good, bad


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one run.

    Attributes:
        log: what its processes noted.
        output: its last lines.
    """

    succeeded: bool
    log: list[dict[str, Any]]
    output: str

    @property
    def verdict(self) -> bool | None:
        """Whether it succeeded; None if a pass left a graph half-way that breaks a rule."""
        return None if any("untestable" in row for row in self.log) else self.succeeded

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the passes that ran, in order."""
        found: dict[str, None] = {}
        for row in self.log:
            found.update(dict.fromkeys(row.get("pipeline", ())))
        return tuple(found)

    def rewrites(self, name: str) -> list[dict[str, Any]]:
        """Those of a pass, in the process that did most of them: ranks do the same ones."""
        by_process: dict[int, list[dict[str, Any]]] = {}
        for row in self.log:
            if row.get("made_by") == name:
                by_process.setdefault(row["process"], []).append(row["rewrite"])
        return max(by_process.values(), key=len, default=[])


class Runs:
    """Runs the command with parts of the passes.

    Args:
        timeout: seconds.
        log: where its processes add what they ran.
        is_own: the command is one of this package, whose exit codes have a meaning.

    Raises:
        InputError: what a command of this package says is wrong with what it was given.
    """

    def __init__(self, command: str, timeout: float, log: Path, is_own: bool = False) -> None:
        self._command, self._timeout, self._log = command, timeout, log
        self._is_own = is_own
        self._known: dict[Request, Outcome] = {}

    def run(
        self, passes: tuple[str, ...] | None = None, partial: tuple[str, int] | None = None
    ) -> Outcome:
        from fxpasses.bisection import Request

        request = Request(str(self._log), passes, partial)
        if request in self._known:
            return self._known[request]
        self._log.write_text("")
        succeeded, output = self._outcome(request)
        log = [json.loads(line) for line in self._log.read_text().splitlines()]
        outcome = self._known[request] = Outcome(succeeded, log, output)
        click.echo(f"{_shown(request):<40} {_verdict(outcome)}", err=True)
        return outcome

    def _outcome(self, request: Request) -> tuple[bool, str]:
        try:
            done = subprocess.run(
                self._command,
                shell=True,
                env={**os.environ, **request.environment()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self._timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"it took longer than {self._timeout:g} s"
        said = done.stdout.splitlines()
        if self._is_own and done.returncode == WRONG:
            raise InputError(said[-1].removeprefix("Error: "))
        return done.returncode == 0, "\n".join(said[-5:])


def _shown(request: Request) -> str:
    passes = "all passes" if request.passes is None else ", ".join(request.passes) or "no pass"
    return (
        passes
        if request.partial is None
        else f"{request.partial[1]} rewrites of {request.partial[0]}"
    )


def _verdict(outcome: Outcome) -> str:
    return {True: "succeeds", False: "fails", None: "can't be told"}[outcome.verdict]
