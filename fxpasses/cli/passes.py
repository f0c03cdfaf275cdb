"""`fxpasses passes`: the passes that are known here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from fxpasses.cli.errors import Command

if TYPE_CHECKING:
    from fxpasses.passes.base import Pass

_CONTRACT = ("requires", "provides", "conflicts")


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def passes(as_json: bool) -> None:
    """List the passes: stage, error bound, contract, options and where these take their default from.

    Passes of other packages are listed too, once installed. A pass of a script is known in that script.
    """
    from fxpasses.registry import passes as known

    rows = [_described(cls) for _, cls in sorted(known().items())]
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(map(_text, rows)))


def _described(cls: type[Pass]) -> dict[str, Any]:
    return {
        "name": cls.name,
        "stage": cls.stage,
        "bitwise": cls.preserves_numerics,
        "error_bound": _bound(cls),
        **{label: sorted(getattr(cls, label)) for label in _CONTRACT},
        "local": cls.local,
        "options": list(_options(cls)),
    }


def _bound(cls: type[Pass]) -> str:
    from fxpasses.registry import has_default

    if cls.preserves_numerics:
        return "bitwise"
    ready = all(map(has_default, dataclasses.fields(cls)))
    return cls().error_bound() if ready else "error bound depends on its options"


def _options(cls: type[Pass]) -> Iterator[dict[str, Any]]:
    """What can stand in braces behind the pass's name."""
    from fxpasses.passes.base import FROM_GROUP
    from fxpasses.registry import has_default

    for field in dataclasses.fields(cls):
        source = field.metadata.get("environment")
        if source in FROM_GROUP:
            continue
        option: dict[str, Any] = {"name": field.name, "type": str(field.type)}
        if source:
            option["from_option"] = source
        elif has_default(field):
            option["default"] = field.default
        yield option


def _text(row: dict[str, Any]) -> str:
    lines = [f"{row['name']}  ({row['stage']} graph; {row['error_bound']})"]
    lines += [f"    {label}: {', '.join(row[label])}" for label in _CONTRACT if row[label]]
    for option in row["options"]:
        default = f" = from {option['from_option']!r}" if "from_option" in option else ""
        if "default" in option:
            default = f" = {option['default']!r}"
        lines.append(f"    {option['name']}: {option['type']}{default}")
    return "\n".join(lines)
