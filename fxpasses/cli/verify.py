"""`fxpasses verify`: what can be shown of the graphs of a program without running them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from fxpasses.cli.errors import NO, Command, InputError
from fxpasses.cli.inputs import resolve
from fxpasses.cli.running import backend_options, run, settings_of

if TYPE_CHECKING:
    from rich.table import Table

    from fxpasses.faults.recovery import Recovery
    from fxpasses.graph import TrainingGraph
    from fxpasses.observers import GraphName
    from fxpasses.passes.base import Pass
    from fxpasses.pipeline import Done, Observer


@click.command(cls=Command)
@click.argument("input")
@click.option("--recovery", is_flag=True, help="Which faults come to an update past all guards?")
@backend_options("An option of the backend, such as guards=all.")
@click.option("--world", type=click.IntRange(1), help="Number of ranks; all but one are pretended.")
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    default=0.92,
    show_default=True,
    help="Share of merge points of each graph that have to be checked.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead.")
def verify(
    input: str,
    recovery: bool,
    options: tuple[str, ...],
    world: int | None,
    threshold: float,
    as_json: bool,
) -> None:
    """Analyse the graphs that passes make of INPUT, without compiling or communicating.

    INPUT is what `fxpasses dump` takes. --recovery looks for the ways from each value that a fault may hit to
    gradients and state, and for guards on them. All blocks of control flow have to be reachable, and the share
    of merge points that are checked must not be below the threshold, in each graph.

    \b
    Exit codes: 0  both hold
                1  one does not, or a pass fails
                2  the command line, or what it names, is wrong
    """
    if not recovery:
        raise InputError("nothing to verify; expected --recovery")
    found: dict[str, Recovery] = {}

    def watcher(name: GraphName) -> list[Observer]:
        from fxpasses.faults.recovery import analyse

        def observe(previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
            # A whole step is one graph for both stages: of interest behind the second.
            is_halfway = name.graph == "joint" and not graph.inputs("tangent")
            if following is None and not is_halfway:
                found[str(name)] = analyse(graph)  # of an exported program's stages the last stays

        return [observe]

    run(resolve(input), settings_of(None, options), world, False, watcher, None, quiet=True)
    if not found:
        raise InputError(f"{input}: no graph was compiled")
    if as_json:
        rows = [{"graph": name, **result.as_dict()} for name, result in found.items()]
        click.echo(json.dumps({"threshold": threshold, "graphs": rows}, indent=2))
    else:
        _print(found, threshold)
    if not all(result.holds(threshold) for result in found.values()):
        raise SystemExit(NO)


def _print(found: dict[str, Recovery], threshold: float) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for name, result in found.items():
        console.print(_table(name, result, threshold))
        for block in result.unreachable:
            console.print(f"  unreachable: {block}", markup=False)
        for site in result.unguarded:
            console.print(f"  unguarded {site}", markup=False)


def _table(name: str, result: Recovery, threshold: float) -> Table:
    from rich.table import Table

    table = Table(title=name, title_justify="left")
    for heading in ("what", "share", "of", "expected", ""):
        table.add_column(heading)
    reached, checked = result.connectivity, result.completeness
    rows = (
        ("blocks reachable", reached, len(result.blocks), "100%", not result.unreachable),
        ("merge points checked", checked, result.merges, f"{threshold:.0%}", checked >= threshold),
    )
    for what, share, count, expected, holds in rows:
        table.add_row(what, f"{share:.1%}", str(count), expected, "ok" if holds else "FAILS")
    guarded = 1 - len(result.unguarded) / result.sites if result.sites else 1.0
    table.add_row("sites guarded", f"{guarded:.1%}", str(result.sites), "", "")
    return table
