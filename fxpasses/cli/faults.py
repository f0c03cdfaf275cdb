"""`fxpasses faults`: campaigns of faults in a program."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpasses.cli.errors import Command

if TYPE_CHECKING:
    from fxpasses.faults.trials import Trials

_PHASES = ("forward", "backward", "gradient")


@click.group()
def faults() -> None:
    """Inject faults into a program, and count what becomes of them."""


@faults.command(cls=Command)
@click.argument("program")
@click.option(
    "--model", default="bitflip", help="What goes wrong: bitflip, 'bitflip{bits=2}', zero, …"
)
@click.option("--where", multiple=True, help="Phase, or phase:pattern; several times for more.")
@click.option("--sites", default=1000, type=click.IntRange(1), help="How many injections.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Of all that is drawn.")
@click.option("--guards", default="", help="Option guards of the backend, 'products,on=skip'.")
@click.option("--backend", default="hardened_aot_eager", help="hardened for compiled code.")
@click.option(
    "--tolerance", default=1e-4, help="Relative change up to which a fault counts as masked."
)
@click.option("--timeout", default=60.0, help="Seconds after which an injection is a hang.")
@click.option("--output", default="campaign", type=click.Path(file_okay=False, path_type=Path))
def campaign(program: str, output: Path, sites: int, timeout: float, **given: Any) -> None:
    """Inject faults into PROGRAM, one in each run of its forward and backward.

    PROGRAM is package.module:name or file.py:name, a function that returns a module and its arguments; a .pt2
    that torch.export.save wrote, run with the inputs that it was exported with; or a .py script, of which the
    first call of what it compiles with this backend is run.

    OUTPUT gets campaign.csv, a row for each injection, report.html and heatmap.png. Started again with the same
    arguments, a campaign that was stopped goes on where it was.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from fxpasses.cli.called import called
    from fxpasses.cli.inputs import Script, resolve
    from fxpasses.faults.campaign import run_campaign
    from fxpasses.faults.report import heading, shares, write_page, write_picture

    found = resolve(program)  # what is wrong with it is said here, not by a process that repeats it
    if not isinstance(found, Script):  # which is run in that process alone
        called(found)
    given["where"] = list(given["where"] or _PHASES)
    settings = {"program": program, **given}
    make = functools.partial(_trials, settings)
    rows = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    done = run_campaign(make, output, settings, sites, timeout)
    with contextlib.closing(done), Progress(*columns, transient=True) as progress:
        task = progress.add_task("injections", total=sites)
        for row in done:
            rows.append(row)
            progress.advance(task)
    write_picture(rows, output / "heatmap.png")
    write_page(rows, settings, output / "report.html", "heatmap.png")
    for line in (heading(()), *shares(rows, ()), heading(("phase",)), *shares(rows, ("phase",))):
        click.echo("  ".join(f"{word:>9}" for word in line))
    click.echo(f"{output / 'campaign.csv'}, report.html, heatmap.png")


@faults.command(cls=Command)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("trial", type=click.IntRange(0))
def reproduce(folder: Path, trial: int) -> None:
    """Print a script that repeats one TRIAL of the campaign in FOLDER, and nothing else."""
    from fxpasses.faults.campaign import SETTINGS, read

    rows = read(folder)
    if trial >= len(rows):
        raise ValueError(f"{folder} has trials 0 to {len(rows) - 1}, and no {trial}")
    settings = json.loads((folder / SETTINGS).read_text())
    click.echo(_script(settings, rows[trial]))


def _trials(settings: dict[str, Any]) -> Trials:
    """
    Raises:
        ValueError: for what is wrong with the program or the options.
    """
    import torch

    from fxpasses.cli.called import blamed, called
    from fxpasses.cli.inputs import resolve
    from fxpasses.faults.trials import Trials, options_of
    from fxpasses.pipeline import made_by_pass

    torch.manual_seed(settings["seed"])  # a worker that goes on has the same parameters
    call = called(resolve(settings["program"]))
    options = options_of(settings["model"], settings["where"], settings["guards"])
    try:
        return Trials(
            call.function,
            call.args,
            {**call.options, **options},
            kwargs=call.kwargs,
            backend=settings["backend"],
            tolerance=settings["tolerance"],
            seed=settings["seed"],
        )
    except Exception as error:
        if isinstance(error, ValueError) or made_by_pass(error):
            raise
        raise blamed(call, settings["program"], error) from error


def _script(settings: dict[str, Any], row: dict[str, str]) -> str:
    what = f"{row['outcome']}, {row['phase']} of {row['layer']} ({row['line']})"
    return f'''"""Trial {row["trial"]} of a campaign: {what}."""

import torch

from fxpasses.cli.called import called
from fxpasses.cli.inputs import resolve
from fxpasses.faults.trials import Trials, options_of

torch.manual_seed({settings["seed"]!r})
call = called(resolve({settings["program"]!r}))
options = options_of({settings["model"]!r}, {settings["where"]!r}, {settings["guards"]!r})
trials = Trials(
    call.function,
    call.args,
    {{**call.options, **options}},
    kwargs=call.kwargs,
    backend={settings["backend"]!r},
    tolerance={settings["tolerance"]!r},
    seed={settings["seed"]!r},
)
shot = trials.shot({settings["seed"]!r}, {int(row["trial"])})
result = trials.run(shot)
print(result.event)
print(result.outcome, result.error, result.said)
assert (shot.site.name, shot.index, result.outcome) == {(row["site"], int(row["index"]), row["outcome"])!r}
'''
