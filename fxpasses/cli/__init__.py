"""The `fxpasses` command."""

from __future__ import annotations

import dataclasses

import click

from fxpasses import __version__
from fxpasses.cli.dump import dump
from fxpasses.cli.faults import faults


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Look into the `hardened` backend of torch.compile."""


main.add_command(dump)
main.add_command(faults)


@main.command()
def passes() -> None:
    """List the passes: stage, contract, options and where these take their default from."""
    from fxpasses.passes.base import FROM_GROUP
    from fxpasses.registry import has_default
    from fxpasses.registry import passes as known

    for name, cls in sorted(known().items()):
        numerics = "bitwise"
        if not cls.preserves_numerics:
            ready = all(map(has_default, dataclasses.fields(cls)))
            numerics = cls().error_bound() if ready else "error bound depends on its options"
        click.echo(f"{name}  ({cls.stage} graph; {numerics})")
        for label in ("requires", "provides", "conflicts"):
            if values := getattr(cls, label):
                click.echo(f"    {label}: {', '.join(sorted(values))}")
        for field in dataclasses.fields(cls):
            source = field.metadata.get("environment")
            if source in FROM_GROUP:
                continue
            default = f" = from {source!r}" if source else f" = {field.default!r}"
            click.echo(f"    {field.name}: {field.type}{default if has_default(field) else ''}")
