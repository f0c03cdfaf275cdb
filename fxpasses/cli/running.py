"""Runs passes over what a command was pointed at: a program, an exported one, or a script."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpasses.cli.called import blamed, called
from fxpasses.cli.errors import InputError, hushed
from fxpasses.cli.inputs import Exported, Input, Program, Script

if TYPE_CHECKING:
    from fxpasses.observers import GraphName, Watcher
    from fxpasses.pipeline import Observer

_RANKS = 2  # where passes communicate and nobody said how many


def backend_options(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`-o KEY=VALUE`, any number of times: argument `options` of a command, for `option` to read."""
    return click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help=help)


def settings_of(passes: str | None, options: tuple[str, ...]) -> dict[str, Any]:
    """The options of the backend, checked."""
    from fxpasses.config import Hardening
    from fxpasses.registry import parse_pipeline

    settings = dict(map(option, options))
    if passes is not None:
        settings["passes"] = passes
    parse_pipeline(Hardening.from_options(settings).passes or "")
    return settings


def option(word: str) -> tuple[str, Any]:
    """What KEY=VALUE says; the value as TOML, or a word without quotes."""
    key, equals, value = word.partition("=")
    if not equals:
        raise InputError(f"option '--option': got {word!r}; expected KEY=VALUE")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def run(
    found: Input,
    settings: dict[str, Any],
    world: int | None,
    every_rank: bool,
    watcher: Watcher,
    output: Path | None,
    quiet: bool,
) -> None:
    """Run passes over an input.

    Args:
        settings: options of the backend.
        world: number of ranks; None: as many as the passes ask for.
        every_rank: look at all of them, not at rank 0 alone.
        output: where to write the exported program that the passes made.
        quiet: don't print what an exported program's signature says.

    Raises:
        InputError: for an option that does not go with the input, and for a script that compiles nothing.
    """
    if output is not None and not isinstance(found, Exported):
        raise InputError(f"option '--output': {found.name} is no exported program")
    if isinstance(found, Script):
        _run_script(found, bool(settings or world), watcher)
        return
    world = world or _world(settings, isinstance(found, Exported))
    for rank in range(world if every_rank else 1):
        if isinstance(found, Program):
            _trace(found, settings, world, rank, watcher)
        else:
            _transform(found, settings, world, rank, watcher, output, quiet)


def _world(settings: dict[str, Any], exported: bool) -> int:
    """The number of ranks, where nobody has said it."""
    from fxpasses.registry import parse_pipeline

    passes = settings.get("passes")
    silent = exported if passes is None else not any(p.communicates for p in parse_pipeline(passes))
    return 1 if silent else _RANKS


def _trace(
    program: Program, settings: dict[str, Any], world: int, rank: int, watcher: Watcher
) -> None:
    from fxpasses.pipeline import made_by_pass
    from fxpasses.spec import SpecError
    from fxpasses.trace import trace

    try:
        with hushed():
            trace(program.function, program.args, settings, world=world, rank=rank, watcher=watcher)
    except (ValueError, SpecError, BrokenPipeError):
        raise
    except Exception as error:
        if made_by_pass(error):
            raise
        raise blamed(called(program), program.name, error) from error


def _run_script(script: Script, has_settings: bool, watcher: Watcher) -> None:
    if has_settings:
        raise InputError(
            f"{script.name}: a script says itself which options and ranks it has; leave --passes, --option, "
            "--world and --ranks out"
        )
    from fxpasses.observers import watching

    seen = False

    def watch(name: GraphName) -> Sequence[Observer]:
        nonlocal seen
        seen = True
        return watcher(name)

    with watching(watch), hushed():
        script.run()
    if not seen:
        raise InputError(f"{script.name}: it compiled nothing with backend='hardened'")


def _transform(
    exported: Exported,
    settings: dict[str, Any],
    world: int,
    rank: int,
    watcher: Watcher,
    output: Path | None,
    quiet: bool,
) -> None:
    import torch

    from fxpasses import exported as programs
    from fxpasses.config import Hardening
    from fxpasses.distributed.fake import fake_world
    from fxpasses.distributed.group import resolve as resolve_group
    from fxpasses.graph import without_warnings_of_pytrees
    from fxpasses.observers import CheckRules, GraphName
    from fxpasses.passes.base import STAGES
    from fxpasses.pipeline import build

    program = exported.program
    if program.dialect == "TRAINING":  # not functional: norms write their buffers in place
        with without_warnings_of_pytrees():
            program = program.run_decompositions()
    graph = programs.exported(program)
    with fake_world(world, rank):
        passes = build(Hardening.from_options(settings), resolve_group(None).name, world, rank)
        if not quiet:
            click.echo(f"specialised: {programs.specialisation(program)}")
        look = watcher(GraphName(rank, 0, "exported"))
        for stage in STAGES:
            passes.run(stage, graph, [CheckRules(), *look])
    if not quiet:
        for kind, target in programs.output_kinds(program):
            click.echo(f"output spec: {kind} {target or ''}".rstrip())
    if output is not None:
        torch.export.save(programs.updated(program, graph), output)
