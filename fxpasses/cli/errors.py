"""How commands end: exit codes, and errors of the user as one line.

    0   done
    1   the answer is no: ranks differ, a pass fails, a command that is asked about fails
    2   the command line, or what it names, is wrong: one line says what and where

Anything else that is raised is a mistake of ours, and shows its traceback.
"""

from __future__ import annotations

import contextlib
import logging
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

OK, NO, WRONG = 0, 1, 2
_OTHERS = (
    Path(__file__).parent.parent,
    *{Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")},
)


class InputError(ValueError):
    """What a command was pointed at can't be read, or fails by itself."""


class Command(click.Command):
    """A command for which a `ValueError` or `OSError` is the user's. That, or what a failing pass raises, is
    one line; `--traceback` shows all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = "Show where in the code an error was raised."
        option = click.Option(["--traceback"], is_flag=True, expose_value=False, help=text)
        option.callback = _remember
        self.params.append(option)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            end = _end(error)
            if end is None:
                raise
            if ctx.meta.get("traceback"):
                click.echo(traceback.format_exc().rstrip(), err=True)
            raise end from error


def _end(error: Exception) -> click.ClickException | None:
    """How the command ends by an error; None: by its traceback, or as click has it."""
    if isinstance(error, BrokenPipeError):  # nobody reads any more: click ends it without a word
        return None
    if note := _note(error):
        return Failed(f"{one_line(error)}; {note}")
    return Wrong(one_line(error)) if isinstance(error, ValueError | OSError) else None


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keep to itself what torch logs of an error, which is raised anyway; not with `--traceback`. What a script
    logs is heard.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.meta.get("traceback"):
        yield
        return
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    handlers = [h for log in loggers if log.name.split(".")[0] == "torch" for h in log.handlers]
    levels = [handler.level for handler in handlers]
    try:
        for handler in handlers:
            handler.setLevel(max(handler.level, logging.ERROR + 1))
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


class Wrong(click.ClickException):
    """Ends the command with one line and exit code 2."""

    exit_code = WRONG


class Failed(click.ClickException):
    """Ends the command with one line and exit code 1."""

    exit_code = NO


def _note(error: BaseException | None) -> str:
    """Where the script is that a failing pass left; empty if it did not."""
    from fxpasses.dump.repro import NOTE

    while error is not None:
        for note in getattr(error, "__notes__", ()):
            if note.startswith(NOTE):
                return note
        error = error.__cause__ or error.__context__
    return ""


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta["traceback"] = value


def one_line(error: BaseException) -> str:
    """What an error says, its first line that is not empty; with its kind where it says little else."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    said = lines[0] if lines else ""
    return said if isinstance(error, ValueError) and said else f"{type(error).__name__}: {said}"


def raised_in(error: BaseException, name: str) -> InputError:
    """What the user's own code raised, as an error that names the line of that code.

    Args:
        name: of the code, where no line of it is known.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
    said = one_line(error).removeprefix(f"{type(error).__name__}: ")
    return InputError(f"{where}: {type(error).__name__}: {said}")


def _is_users(filename: str) -> bool:
    """A file that is neither ours nor Python's or a library's."""
    path = Path(filename)
    foreign = "site-packages" in path.parts or any(map(path.is_relative_to, _OTHERS))
    return path.is_file() and not foreign
