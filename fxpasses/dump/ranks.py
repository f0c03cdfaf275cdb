"""Where the dumps of several ranks differ, in what they will launch or in which nodes they have.

What a rank's own batch or place decides is no difference: shapes of values, and numbers among the arguments,
such as where its shard begins. A collective has to be the same on all: operator, dtype, shape and settings.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fxpasses.effects import COLLECTIVE_NAMESPACE

_Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference.

    Attributes:
        where: the file in which it shows, and what is not the same (`"g0.backward/03-bucketing: node 2"`).
        sides: what each folder has there.
    """

    where: str
    sides: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join([self.where, *(f"  {folder}: {what}" for folder, what in self.sides)])


def first_difference(folders: Sequence[Path]) -> Difference | None:
    """Compare the dumps of ranks (`dump/rank0`, `dump/rank1`, …), graph by graph and pass by pass.

    Raises:
        ValueError: for fewer than two folders, and one that holds no dump.
    """
    if len(folders) < 2:
        raise ValueError(f"got {len(folders)} rank to compare; expected two or more")
    files = [_files(folder) for folder in folders]
    for name in sorted(set().union(*files)):
        missing = [
            str(folder) for folder, own in zip(folders, files, strict=True) if name not in own
        ]
        if missing:
            there = ((str(f), "missing" if str(f) in missing else "there") for f in folders)
            return Difference(name.removesuffix(".json"), tuple(there))
        rows = [json.loads((folder / name).read_text())["nodes"] for folder in folders]
        if found := _differing(rows):
            what, texts = found
            pairs = tuple(zip(map(str, folders), texts, strict=True))
            return Difference(f"{name.removesuffix('.json')}: {what}", pairs)
    return None


def ranks_in(folder: Path) -> list[Path]:
    """The folders of the ranks in a dump, in order.

    Raises:
        ValueError: where there are none.
    """
    found = [p for p in folder.glob("rank*") if p.is_dir() and p.name[4:].isdigit()]
    if not found:
        raise ValueError(f"{folder}: holds no dump (rank0/g0.backward/00-input.json and others)")
    return sorted(found, key=lambda p: int(p.name[4:]))


def _files(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.glob("*/*.json")}
    if not found:
        raise ValueError(
            f"{folder}: holds no dump of a rank (g0.backward/00-input.json and others)"
        )
    return found


def _differing(graphs: Sequence[_Rows]) -> tuple[str, list[str]] | None:
    collectives = [[row for row in rows if _is_collective(row)] for rows in graphs]
    shown = [{row["name"]: row for row in rows} for rows in graphs]
    for kind, each, key in (("collective", collectives, _launched), ("node", graphs, _identity)):
        sides = [
            list(map(key, rows, itertools.repeat(known)))
            for rows, known in zip(each, shown, strict=True)
        ]
        for position, values in enumerate(itertools.zip_longest(*sides)):
            if any(value != values[0] for value in values):
                rows = [own[position] if position < len(own) else None for own in each]
                described = [_described(r, known) for r, known in zip(rows, shown, strict=True)]
                return f"{kind} {position + 1}", described
    return None


def _is_collective(row: dict[str, Any]) -> bool:
    target = row["target"]
    return target.startswith(f"torch.ops.{COLLECTIVE_NAMESPACE}.") and "wait_tensor" not in target


def _launched(row: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> object:
    """What all ranks have to launch alike. An all-to-all may differ in its splits, and so in its sizes."""
    split = "all_to_all" in row["target"]
    payload = _payload(row, nodes)
    settings = row["args"][-1:] if split else row["args"][1:]
    return row["target"], payload["dtype"], None if split else payload["shape"], settings


def _payload(row: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return nodes[row["args"][0]["node"]]["value"]


def _identity(row: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> object:
    value = row.get("value")
    dtype = value["dtype"] if isinstance(value, dict) else None
    return row["name"], row["target"], tuple(_read(row["args"])), dtype


def _read(value: Any) -> Iterator[str]:
    """The nodes among arguments."""
    if isinstance(value, list):
        for item in value:
            yield from _read(item)
    elif isinstance(value, dict):
        if "node" in value:
            yield value["node"]
        else:
            yield from _read(list(value.values()))


def _described(row: dict[str, Any] | None, nodes: dict[str, dict[str, Any]]) -> str:
    if row is None:
        return "nothing"
    origin = row.get("provenance") or {}
    value = _payload(row, nodes) if _is_collective(row) else row.get("value")
    parts = [f"{row['name']} = {row['target']}"]
    if isinstance(value, dict):
        parts.append(f"of {value['dtype']}{value['shape']}")
    if origin.get("parameters"):
        parts.append(f"for {', '.join(origin['parameters'])}")
    if line := origin.get("model_line") or row.get("line"):
        parts.append(f"({line})")
    return " ".join(parts)
