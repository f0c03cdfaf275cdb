"""Option `guards`: what is checked, and what happens on an alarm.

    "products,payloads,on=skip"    {"products": True, "values": 1e6, "digest": 50, "on": "skip"}    "all"

In a pipeline string: `products payloads on=skip`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fxpasses.config import nearest

RAISE, SKIP, RECOMPUTE = REACTIONS = ("raise", "skip", "recompute")
ALL = "all"
_SWITCHES = ("products", "payloads", "gradients")


@dataclasses.dataclass(frozen=True)
class Guards:
    """What is guarded.

    Attributes:
        products: checksums of matrix products, in forward and backward.
        payloads: checksums of what goes over the wire, dense or compressed.
        gradients: bits of gradients, from the operator that makes one to where it is packed; of those that are
            sums, and no products, a second sum.
        values: limit of the absolute value of a local gradient's elements; infinity asks only that they are
            finite; 0: they are not looked at.
        digest: parameters are compared over the ranks at every so many steps; 0: never.
        on: what an alarm does: `"raise"`, `"skip"` the step, or `"recompute"` what it is about.
        region: pattern of qualified module names; with `"recompute"` such a module's operators are computed
            again alone, and any other alarm raises. Empty: the whole forward or backward is.
    """

    products: bool = False
    payloads: bool = False
    gradients: bool = False
    values: float = 0.0
    digest: int = 0
    on: str = RAISE
    region: str = ""

    def __bool__(self) -> bool:
        return self.in_graph or self.digest > 0

    @property
    def in_graph(self) -> bool:
        """Whether graphs hold any of them."""
        return any(getattr(self, name) for name in _SWITCHES) or self.values > 0

    @property
    def repeats_calls(self) -> bool:
        """Whether an alarm makes the whole forward or backward run again."""
        return self.on == RECOMPUTE and not self.region

    @property
    def text(self) -> str:
        """As in a pipeline string; empty for none."""
        if not self:
            return ""
        words = [name for name in _SWITCHES if getattr(self, name)]
        words += [f"values={self.values}"] if self.values else []
        words += [f"digest={self.digest}"] if self.digest else []
        words += [f"on={self.on}"] if self.on != RAISE else []
        words += [f"region={self.region}"] if self.region else []
        return " ".join(words)


def guards_text(value: Any) -> str:
    """The option as it stands in a pipeline string; empty without guards.

    Raises:
        ValueError: naming what is wrong, what was got, and what would work.
    """
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return _guards(value).text
    if not isinstance(value, str):
        raise ValueError(
            f"option 'guards': got {value!r}; expected a string such as 'products,payloads' or a mapping"
        )
    return parse_guards(value).text


def parse_guards(text: str) -> Guards:
    """Read either form of string."""
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if key == ALL and not equals:
            found = {**dict.fromkeys(_SWITCHES, True), "values": math.inf, "digest": 100} | found
        elif not equals:
            found[key] = math.inf if key == "values" else True
        else:
            found[key] = value if key == "region" else _number(value)
    return _guards(found)


def _guards(found: Mapping[str, Any]) -> Guards:
    known = [field.name for field in dataclasses.fields(Guards)]
    for key in found:
        if key not in known:
            raise ValueError(f"option 'guards': unknown {key!r}{nearest(str(key), [*known, ALL])}")
    guards = Guards(**found)
    for key in _SWITCHES:
        if not isinstance(getattr(guards, key), bool):
            _refuse(guards, key, "true or false")
    values, digest = guards.values, guards.digest
    if isinstance(values, bool) or not isinstance(values, int | float) or not values >= 0:
        _refuse(guards, "values", "a positive limit, or inf")
    if isinstance(digest, bool) or not isinstance(digest, int) or digest < 0:
        _refuse(guards, "digest", "a number of steps, 100 for example")
    if guards.on not in REACTIONS:
        raise ValueError(
            f"option 'guards': got on={guards.on!r}{nearest(str(guards.on), REACTIONS)}"
        )
    _check_region(guards)
    return guards


def _check_region(guards: Guards) -> None:
    region = guards.region
    if not isinstance(region, str) or any(c in " ,;{}" for c in region):
        _refuse(guards, "region", "a pattern of module names, 'blocks.*' for example")
    if region and guards.on != RECOMPUTE:
        raise ValueError(
            f"option 'guards': got region={region!r} with on={guards.on!r}; a region is what on='recompute' is "
            "about"
        )
    if region and not (guards.products or guards.gradients):
        raise ValueError(
            f"option 'guards': got region={region!r}, and no guard that looks into a region; add 'products' or "
            "'gradients'"
        )


def _refuse(guards: Guards, key: str, wanted: str) -> None:
    raise ValueError(f"option 'guards': got {key}={getattr(guards, key)!r}; expected {wanted}")


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)
