"""`fxpasses dump`: what passes make of a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fxpasses.cli.completion import pass_names
from fxpasses.cli.errors import NO, Command, InputError
from fxpasses.cli.inputs import resolve
from fxpasses.cli.onlookers import Onlookers, Shown
from fxpasses.cli.printing import CHANGES
from fxpasses.cli.running import backend_options, run, settings_of


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
    "errors",
    is_flag=True,
    help="Run the graphs of all ranks on random inputs: how far are results behind each pass from those in "
    "fp32, and from those in front of it?",
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
    compare: bool,
    output: Path | None,
    **shown: Any,
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
    input, text = _input_and_passes(words, passes)
    if world is not None and ranks is not None and world != ranks:
        raise InputError(f"got --world {world} and --ranks {ranks}; either says how many there are")
    found = resolve(input)  # first: it may register passes
    settings = settings_of(text, options)
    asked = Shown(**shown)
    onlookers = Onlookers(asked, settings)
    every = ranks is not None or asked.errors
    run(found, settings, ranks or world, every, onlookers.watch, output, quiet=asked.as_json)
    onlookers.finish()


def _input_and_passes(words: tuple[str, ...], passes: str | None) -> tuple[str, str | None]:
    """INPUT, and the pipeline string, behind it or by option."""
    input, *more = words
    if len(more) > 1:
        raise InputError(
            f"got {len(words)} arguments: {' '.join(words)}; expected INPUT [PIPELINE]"
        )
    if more and passes is not None:
        raise InputError(f"got the passes twice: {more[0]!r} and --passes {passes!r}")
    return input, more[0] if more else passes


def _compare(folders: list[Path]) -> None:
    """Print the first difference between the dumps of ranks, and exit with 1, if there is one."""
    from fxpasses.dump.ranks import first_difference, ranks_in

    if len(folders) == 1:
        folders = ranks_in(folders[0])
    if difference := first_difference(folders):
        click.echo(str(difference))
        raise SystemExit(NO)
    click.echo(f"{len(folders)} ranks do the same")
