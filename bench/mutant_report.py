"""What became of mutants: as a table, and kept by module, since all of them take hours."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence

from bench import RESULTS
from bench.mutations import PATHS

TABLE = RESULTS / "mutants.txt"
RECORDS = TABLE.with_suffix(".json")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a module's mutants.

    Attributes:
        module: one of `PATHS`.
        date, torch: when this was found, and with which version.
        examples: drawn for each property.
        every: one of so many of the mutants made by rule was tried; all of those by hand were.
        tried: how many that were.
        survived: names of those that did, with the reason where it is known.
        equivalent: names of those that were not tried, since nothing can tell them from the original, with the
            reason.
        left_out: how many the rules don't make, by the reason.
    """

    module: str
    date: str
    torch: str
    examples: int
    every: int
    tried: int
    survived: dict[str, str]
    equivalent: dict[str, str]
    left_out: dict[str, int]


def report(outcomes: Sequence[Outcome]) -> str:
    """Tables of what was killed, survived, could not be told, and was not made."""
    lines = [
        f"{'module':16}{'mutants':>8}{'killed':>8}{'survived':>10}{'':>9}{'equivalent':>12}{'not made':>10}"
        "   by rule"
    ]
    lines += [_row(one.module, [one]) + _how(one) for one in outcomes]
    lines += [_row("all", outcomes), "", "Survived:"]
    lines += _named([one.survived for one in outcomes])
    lines += ["", "Equivalent, and so not tried:"]
    lines += _named([one.equivalent for one in outcomes])
    lines += ["", "Changes that the rules could make and don't:"]
    counted = sum((Counter(one.left_out) for one in outcomes), Counter[str]())
    lines += [f"{count:6}  {reason}" for reason, count in counted.most_common()]
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    tried = sum(one.tried for one in outcomes)
    alive = sum(len(one.survived) for one in outcomes)
    equivalent = sum(len(one.equivalent) for one in outcomes)
    missing = sum(sum(one.left_out.values()) for one in outcomes)
    percent = f"{100 * (tried - alive) / max(tried, 1):.1f} %"
    return f"{name:16}{tried:8}{tried - alive:8}{alive:10}{percent:>9}{equivalent:12}{missing:10}"


def _how(one: Outcome) -> str:
    share = "all" if one.every == 1 else f"1 of {one.every}"
    return f"   {share:8}{one.date}, torch {one.torch}, {one.examples} examples a property"


def _named(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [
        line for row in rows for name, reason in row.items() for line in (name, f"    {reason}")
    ]
    return [f"  {line}" for line in lines or ["none"]]


def kept() -> dict[str, Outcome]:
    """What was found before, by module."""
    rows = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    return {row["module"]: Outcome(**row) for row in rows if row["module"] in PATHS}


def keep(outcomes: Sequence[Outcome]) -> None:
    RECORDS.write_text(json.dumps([dataclasses.asdict(one) for one in outcomes], indent=1) + "\n")
    TABLE.write_text(report(outcomes) + "\n")
