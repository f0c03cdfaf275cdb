"""`fxpasses dump`: what passes make of a program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fxpasses.cli.completion import pass_names
from fxpasses.cli.errors import NO, Command, InputError
from fxpasses.cli.inputs import resolve
from fxpasses.cli.printing import CHANGES, Printer, Wanted, known_passes
from fxpasses.cli.running import backend_options, run, settings_of

if TYPE_CHECKING:
    from fxpasses.dump.errors import Errors
    from fxpasses.dump.page import Page
    from fxpasses.graph import TrainingGraph
    from fxpasses.observers import GraphName
    from fxpasses.passes.base import Pass
    from fxpasses.pipeline import Done, Observer


class _Dump(Command):
    """Lets `--print-changed` stand without a value in front of another argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        bare = "--print-changed"
        return super().parse_args(ctx, [f"{bare}=full" if a == bare else a for a in args])


@click.command(cls=_Dump)
@click.argument("words", nargs=-1, required=True, metavar="INPUT [PIPELINE]")
@click.option(
    "--passes",
    shell_complete=pass_names,
    help="The passes, such as 'cast{dtype=bf16},bucketing{mb=25},compress{scheme=int4}'.",
)
@backend_options("An option of the backend, such as precision=bf16 or loss_scale=dynamic.")
@click.option("--world", type=click.IntRange(1), help="Number of ranks; all but one are pretended.")
@click.option("--ranks", type=click.IntRange(1), help="The same, with the graphs of each rank.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write rank0/g0.backward/03-compress.py (.diff, .json, .dot) to this folder.",
)
@click.option(
    "--html",
    "html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all graphs, passes and differences to this file, for a browser; it needs nothing else.",
)
@click.option(
    "--svg",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw each graph behind its last pass, collapsed by module, into this folder. Needs Graphviz.",
)
@click.option(
    "--svg-nodes",
    type=click.IntRange(1),
    default=150,
    show_default=True,
    help="Boxes that a drawing may have.",
)
@click.option(
    "--print-changed",
    "changed",
    type=click.Choice(CHANGES),
    help="Print the graph after each pass that changed it, or what changed; 'quiet': no line for others.",
)
@click.option(
    "--filter-passes",
    "only",
    multiple=True,
    shell_complete=pass_names,
    help="Print no other passes than these.",
)
@click.option(
    "--print-before",
    "before",
    multiple=True,
    shell_complete=pass_names,
    help="Print the graph before these passes.",
)
@click.option(
    "--print-after",
    "after",
    multiple=True,
    shell_complete=pass_names,
    help="Print the graph after these passes.",
)
@click.option("--time-passes", "times", is_flag=True, help="Print the seconds that each pass took.")
@click.option(
    "--errors",
    "with_errors",
    is_flag=True,
    help="Run the graphs of all ranks on random inputs: how much does each pass change results?",
)
@click.option("--json", "as_json", is_flag=True, help="Print what passes did as JSON instead.")
@click.option(
    "--compare-ranks",
    "compare",
    is_flag=True,
    help="Compare what ranks have dumped instead: the arguments are dump/rank0 dump/rank1 …, or dump.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the exported program that the passes made, as .pt2.",
)
def dump(
    words: tuple[str, ...],
    passes: str | None,
    options: tuple[str, ...],
    world: int | None,
    ranks: int | None,
    out: Path | None,
    html: Path | None,
    svg: Path | None,
    svg_nodes: int,
    changed: str | None,
    only: tuple[str, ...],
    before: tuple[str, ...],
    after: tuple[str, ...],
    times: bool,
    with_errors: bool,
    as_json: bool,
    output: Path | None,
    compare: bool,
) -> None:
    """Run passes over INPUT, and see the graph after each of them.

    INPUT is module:name (or file.py:name) of a function that returns (module, args) or of a class with
    `example_inputs`; a .pt2 that torch.export.save wrote, which stays in the mode that it was exported in;
    or a .py script, which is run as it is. The passes are those that the options ask for, or PIPELINE. With
    no option that asks for something else whole graphs are printed. The rules that every graph obeys are
    checked after each pass.

    \b
    Exit codes: 0  done
                1  a pass fails or breaks a rule; ranks differ
                2  the command line, or what it names, is wrong
    """
    if compare:
        _compare([Path(word) for word in words])
        return
    if len(words) > 2:
        raise InputError(
            f"got {len(words)} arguments: {' '.join(words)}; expected INPUT [PIPELINE]"
        )
    input, pipeline = words[0], words[1] if len(words) == 2 else None
    if passes and pipeline:
        raise InputError(f"got the passes twice: {pipeline!r} and --passes {passes!r}")
    if world is not None and ranks is not None and world != ranks:
        raise InputError(f"got --world {world} and --ranks {ranks}; either says how many there are")
    found = resolve(input)  # first: it may register passes
    text = passes if passes is not None else pipeline
    wanted = Wanted(
        changed=None if as_json else changed,
        lines=(out or html or svg) is not None and not as_json,
        before=known_passes(before, "--print-before"),
        after=known_passes(after, "--print-after"),
        only=known_passes(only, "--filter-passes"),
        graphs=not (
            out or html or svg or changed or before or after or times or with_errors or as_json
        ),
    )
    printer = Printer(wanted)
    page = _page() if html is not None else None
    errors = _errors() if with_errors else None
    watches: list[Callable[[GraphName], Observer]] = [printer.watch]
    watches += [watching.watch for watching in (page, errors) if watching is not None]
    watches += [_written(out)] if out is not None else []
    watches += [_drawn(svg, svg_nodes)] if svg is not None else []
    watches.append(_reproduced(out))
    settings = settings_of(text, options)

    def watcher(name: GraphName) -> list[Observer]:
        return [watch(name) for watch in watches]

    every = ranks is not None or with_errors
    run(found, settings, ranks or world, every, watcher, output, quiet=as_json)
    if errors is not None:
        changes = errors.measured()
        printer.add_errors(changes)
        if page is not None:
            page.add_errors(changes)
    if html is not None and page is not None:
        html.write_text(page.html())
    if as_json:
        printer.print_json(times)
        return
    if times:
        printer.print_times()
    if with_errors:
        printer.print_errors()


def _compare(folders: list[Path]) -> None:
    """Print the first difference between the dumps of ranks, and exit with 1, if there is one."""
    from fxpasses.dump.ranks import first_difference, ranks_in

    if len(folders) == 1:
        folders = ranks_in(folders[0])
    if difference := first_difference(folders):
        click.echo(str(difference))
        raise SystemExit(NO)
    click.echo(f"{len(folders)} ranks do the same")


def _page() -> Page:
    from fxpasses.dump.page import Page

    return Page()


def _errors() -> Errors:
    from fxpasses.dump.errors import Errors

    return Errors()


def _written(out: Path) -> Callable[[GraphName], Observer]:
    """Makes observers that write a graph's files."""

    def watch(name: GraphName) -> Observer:
        from fxpasses.dump.folder import Dump

        return Dump(out / str(name))

    return watch


def _reproduced(out: Path | None) -> Callable[[GraphName], Observer]:
    """Makes observers that leave a script when a pass fails."""

    def watch(name: GraphName) -> Observer:
        from fxpasses.dump.repro import Repro

        path = Path("fxpasses-repro.py") if out is None else out / str(name) / "repro.py"
        return Repro(path, str(name))

    return watch


def _drawn(folder: Path, limit: int) -> Callable[[GraphName], Observer]:
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
