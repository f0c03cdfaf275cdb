"""`fxpasses dump`: what passes make of an exported program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fxpasses.cli.errors import Command

if TYPE_CHECKING:
    from fxpasses.graph import TrainingGraph
    from fxpasses.passes.base import Pass
    from fxpasses.pipeline import Done


@click.command(cls=Command)
@click.argument("program", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("pipeline")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the program that the passes made, as .pt2.",
)
def dump(program: Path, pipeline: str, output: Path | None) -> None:
    """Run PIPELINE over the exported PROGRAM and print the graph after each pass.

    PROGRAM is a file that torch.export.save wrote, PIPELINE a string such as "cast{dtype=bf16}". The rules that
    every graph obeys are checked after each pass. The program stays in the mode that it was exported in.
    """
    import torch

    from fxpasses.config import Hardening
    from fxpasses.exported import exported, output_kinds, specialisation, updated
    from fxpasses.observers import CheckRules, text
    from fxpasses.passes.base import STAGES
    from fxpasses.pipeline import build

    passes = build(Hardening(passes=pipeline), None, world=1, rank=0)
    loaded = torch.export.load(program)
    if loaded.dialect == "TRAINING":  # not functional: norms write their buffers in place
        loaded = loaded.run_decompositions()
    graph = exported(loaded)
    click.echo(f"specialised: {specialisation(loaded)}")
    click.echo(text(None, graph))

    def show(previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        if previous is not None:
            click.echo(text(previous, graph))

    for stage in STAGES:
        passes.run(stage, graph, [CheckRules(), show])
    for kind, target in output_kinds(loaded):
        click.echo(f"output spec: {kind} {target or ''}".rstrip())
    if output is not None:
        torch.export.save(updated(loaded, graph), output)
