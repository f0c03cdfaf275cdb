"""The `fxpasses` command."""

from __future__ import annotations

import click

from fxpasses import __version__
from fxpasses.cli.bisect import bisect
from fxpasses.cli.completion import completion
from fxpasses.cli.dump import dump
from fxpasses.cli.faults import faults
from fxpasses.cli.passes import passes
from fxpasses.cli.plan import plan
from fxpasses.cli.verify import verify


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Look into the `hardened` backend of torch.compile."""


main.add_command(dump)
main.add_command(passes)
main.add_command(bisect)
main.add_command(completion)
main.add_command(plan)
main.add_command(faults)
main.add_command(verify)
