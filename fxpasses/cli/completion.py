"""`fxpasses completion`: what a shell needs to complete commands, options and names of passes."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from fxpasses.cli.errors import Command

_SHELLS = ("bash", "zsh", "fish")


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash, zsh:  eval "$(fxpasses completion bash)"
    fish:       fxpasses completion fish | source
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "fxpasses", "_FXPASSES_COMPLETE").source())


def pass_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the name of a pass, behind a comma too."""
    from fxpasses.registry import passes

    done, comma, start = incomplete.rpartition(",")
    return [CompletionItem(done + comma + n) for n in sorted(passes()) if n.startswith(start)]
