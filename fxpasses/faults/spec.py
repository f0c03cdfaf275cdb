"""Option `faults`: what goes wrong, where and when.

    "bitflip{bit=30,where=gradient:layers.3.*,rank=1,step=20}"      several are separated by ";", or a list

In a pipeline string: `bitflip bit=30 where=gradient:layers.3.* rank=1 step=20`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from fxpasses.config import nearest
from fxpasses.patterns import split

FORWARD, BACKWARD, GRADIENT, PAYLOAD, UPDATE = PHASES = (
    "forward",
    "backward",
    "gradient",
    "payload",
    "update",
)
# Which pass injects faults of which phase; `update` is the optimizer's.
INJECTED_BY = {
    FORWARD: "inject_forward",
    BACKWARD: "inject",
    GRADIENT: "inject",
    PAYLOAD: "inject_payload",
}
EVERYWHERE = ("where", "op", "rank", "step", "seed")
# What each model can be told besides.
MODELS = {
    "bitflip": ("bit", "bits", "index"),
    "stuck": ("bit", "value", "index"),
    "truncate": ("bits", "probability"),
    "zero": ("index",),
    "sign": ("index",),
    "nan": ("index",),
    "inf": ("index",),
    "scale": ("factor", "index"),
    "stale": (),
    "delay": ("seconds",),
    "missing": (),
    "exit": ("code",),
}
OF_COLLECTIVES = ("stale", "missing")
ELEMENTWISE = ("bitflip", "stuck", "truncate", "zero", "sign", "nan", "inf", "scale")
BY_HAND = "none"  # no step: armed by `runtime(model).faults.strike`


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        model: one of `MODELS`.
        phase: one of `PHASES`: results of operators in the forward or backward, a parameter's gradient before
            it is reduced, what a collective sends (`stale`: what it brings), or parameters after an update.
        pattern: of qualified module names (forward, backward) or parameter names (else).
        op: of operators, `"mm"` for example.
        rank: that it happens on; None: all.
        first, last: steps, both included, from 0; `last` None: for ever. Nothing happens by itself if
            `first` > `last`.
        seed: of what is drawn: the site among those that match, element, bits.
        bit: of the element, from the lowest, 0; empty: drawn.
        bits: (bitflip) how many are drawn; (truncate) how many of the mantissa's lowest become 0.
        value: (stuck) 0 or 1.
        index: element of the flattened tensor; None: drawn.
        probability: (truncate) of each element.
        factor: (scale) of the element.
        seconds: (delay) that the rank sleeps.
        code: (exit) of the process.
    """

    model: str
    phase: str = GRADIENT
    pattern: str = "*"
    op: str = "*"
    rank: int | None = 0
    first: int = 0
    last: int | None = None
    seed: int = 0
    bit: tuple[int, ...] = ()
    bits: int = 1
    value: int = 1
    index: int | None = None
    probability: float = 1.0
    factor: float = 2.0
    seconds: float = 1.0
    code: int = 1

    def is_active(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)

    def selects(self, phase: str, names: Iterable[str], operator: str) -> bool:
        """Whether it may happen at a site.

        Args:
            names: of its modules or parameters.
        """
        fits = phase == self.phase and fnmatch.fnmatchcase(operator, self.op)
        return fits and (
            self.pattern == "*" or any(fnmatch.fnmatchcase(n, self.pattern) for n in names)
        )

    @property
    def text(self) -> str:
        """As in a pipeline string."""
        step = f"{self.first}-" if self.last is None else f"{self.first}-{self.last}"
        if self.last is not None and self.first > self.last:
            step = BY_HAND
        words = {
            "where": f"{self.phase}:{self.pattern}",
            "op": self.op,
            "rank": "all" if self.rank is None else str(self.rank),
            "step": step,
            "seed": str(self.seed),
            "bit": "+".join(map(str, self.bit)),
        }
        default = Fault(self.model)
        given = [self.model, f"where={words['where']}"]
        for key in ("op", "rank", "step", "seed", *MODELS[self.model]):
            word = words.get(key, str(getattr(self, key, "")))
            before = getattr(default, "first" if key == "step" else key)
            now = (self.first, self.last) if key == "step" else getattr(self, key)
            if now != ((0, None) if key == "step" else before):
                given.append(f"{key}={word}")
        return " ".join(given)


def faults_text(value: Any) -> str:
    """The option as it stands in a pipeline string; empty without faults.

    Raises:
        ValueError: naming what is wrong, what was got, and what would work.
    """
    if value is None:
        return ""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError(
            f"option 'faults': got {value!r}; expected a string such as "
            "'bitflip{bit=30,where=gradient,step=20}' or a list of such"
        )
    return ";".join(fault.text for item in items for fault in parse_faults(item))


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read faults in either form, separated by semicolons."""
    return tuple(_parse(part.strip()) for part in split(text, ";") if part.strip())


def check_ranks(text: str, world: int) -> None:
    """
    Raises:
        ValueError: for a fault on a rank that does not exist.
    """
    for fault in parse_faults(text):
        if fault.rank is not None and fault.rank >= world:
            raise ValueError(
                f"option 'faults': {fault.text!r}: rank {fault.rank} is outside the world, which has "
                f"ranks 0 to {world - 1}"
            )


def _parse(item: str) -> Fault:
    match = re.fullmatch(r"(\w+)\s*\{(.*)\}", item) or re.fullmatch(r"(\w+)((?:\s+\S+=\S+)*)", item)
    if match is None:
        raise ValueError(
            f"option 'faults': can't read {item!r}; expected model{{key=value,...}}, for example "
            "'bitflip{bit=30,where=gradient:layers.3.*,rank=1,step=20}'"
        )
    model, body = match[1], match[2]
    if model not in MODELS:
        raise ValueError(f"option 'faults': unknown model {model!r}{nearest(model, MODELS)}")
    fields: dict[str, Any] = {"model": model}
    words = split(body, ",") if "{" in item else body.split()
    for word in filter(None, (w.strip() for w in words)):
        key, equals, value = (part.strip() for part in word.partition("="))
        known = (*EVERYWHERE, *MODELS[model])
        if not equals or key not in known:
            raise ValueError(f"option 'faults': {item!r} has no {key!r}{nearest(key, known)}")
        try:
            fields |= _READERS[key](value)
        except ValueError as error:
            raise ValueError(f"option 'faults': {item!r}: {key}={value}: {error}") from error
    fault = Fault(**fields)
    _check(fault, item)
    return fault


def _check(fault: Fault, item: str) -> None:
    if fault.model in OF_COLLECTIVES and fault.phase != PAYLOAD:
        raise ValueError(
            f"option 'faults': {item!r}: {fault.model!r} happens to collectives; expected where=payload"
        )
    if fault.model == "stuck" and not fault.bit:
        raise ValueError(
            f"option 'faults': {item!r}: needs the bit that is stuck, bit=30 for example"
        )
    if fault.model == "truncate" and fault.bits < 1:
        raise ValueError(f"option 'faults': {item!r}: expected 1 bit or more")


def _where(text: str) -> dict[str, Any]:
    phase, _, pattern = text.partition(":")
    if phase not in PHASES:
        raise ValueError(f"expected phase or phase:pattern{nearest(phase, PHASES)}")
    return {"phase": phase, "pattern": pattern or "*"}


def _steps(text: str) -> dict[str, Any]:
    if text == BY_HAND:
        return {"first": 1, "last": 0}
    first, dash, last = text.partition("-")
    if not first.isdigit() or not (last.isdigit() or not last):
        raise ValueError("expected a step (20), steps (20-30), all from one on (20-) or none")
    if not dash:
        return {"first": int(first), "last": int(first)}
    return {"first": int(first), "last": int(last) if last else None}


def _number(key: str, least: int = 0, most: float = math.inf) -> Callable[[str], dict[str, Any]]:
    def read(text: str) -> dict[str, Any]:
        if not text.isdigit() or not least <= int(text) <= most:
            upper = "" if most == math.inf else f", at most {most}"
            raise ValueError(f"expected a whole number, {least} or more{upper}")
        return {key: int(text)}

    return read


def _real(key: str, least: float, most: float = math.inf) -> Callable[[str], dict[str, Any]]:
    def read(text: str) -> dict[str, Any]:
        value = float(text)
        if not least <= value <= most:
            raise ValueError(f"expected a number from {least} to {most}")
        return {key: value}

    return read


_READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "where": _where,
    "op": lambda text: {"op": text.removeprefix("aten.")},
    "rank": lambda text: {"rank": None} if text == "all" else _number("rank")(text),
    "step": _steps,
    "seed": _number("seed"),
    "bit": lambda text: {"bit": tuple(_number("bit")(part)["bit"] for part in text.split("+"))},
    "bits": _number("bits", 1),
    "value": _number("value", 0, 1),
    "index": _number("index"),
    "probability": _real("probability", 0.0, 1.0),
    "factor": _real("factor", -math.inf),
    "seconds": _real("seconds", 0.0),
    "code": _number("code", 0, 255),
}
