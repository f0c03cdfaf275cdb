"""What a plan knows of the machine: a few rates, from a table or measured (`fxpasses plan --calibrate`).

In a profile file they are the table `machine`, in options the mapping `machine`:

    [machine]
    flops = 8.1e10
    bandwidth = 1.18e8
    [machine.encode_s]
    int8 = 1.1e-9
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fxpasses.config import nearest

# Seconds an element, of one core of an x86 server; see docs/benchmarks.md. Decoding: for each payload.
_ENCODE_S = {"int8": 1.1e-9, "int4": 1.1e-9, "fp16": 1.0e-9, "bf16": 0.8e-9, "topk": 2.1e-9}
_DECODE_S = {"int8": 2.7e-10, "int4": 2.6e-10, "fp16": 4.5e-10, "bf16": 3.8e-10, "topk": 4.7e-10}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of one rank and of its link. The defaults are a core of an x86 server behind 1 Gbit/s.

    Attributes:
        flops, flops_16: floating-point operations a second in products of 32 bits and of 16.
        memory: bytes a second that are read or written.
        operator_s: seconds that a kernel takes at least.
        bandwidth: bytes a second that a rank sends, while it receives as many.
        latency: seconds from one rank to another, of an empty message.
        collective_s: seconds that the host needs to launch a collective.
        host_s: seconds of computing that the host loses for each byte that it sends.
        encode_s: by scheme of compression, seconds an element.
        decode_s: by scheme, seconds for each element of each payload that is decoded.
    """

    flops: Any = 6e10
    flops_16: Any = 6e10
    memory: Any = 1e10
    operator_s: Any = 3e-6
    bandwidth: Any = 1.18e8
    latency: Any = 1e-4
    collective_s: Any = 1e-4
    host_s: Any = 0.0
    encode_s: Mapping[str, Any] = dataclasses.field(default_factory=_ENCODE_S.copy)
    decode_s: Mapping[str, Any] = dataclasses.field(default_factory=_DECODE_S.copy)

    @classmethod
    def parse(cls, given: Any) -> Machine:
        """From a mapping of some of the fields, or the text of one; the others keep their defaults.

        Raises:
            ValueError: naming the key that is wrong, and what would work.
        """
        if not given or isinstance(given, Machine):
            return given or cls()
        if isinstance(given, str):
            given = _from_text(given)
        if not isinstance(given, Mapping):
            raise ValueError(f"option 'machine': got {given!r}; expected a mapping")
        fields = {field.name for field in dataclasses.fields(cls)}
        found: dict[str, Any] = {}
        for key, value in given.items():
            if key not in fields:
                raise ValueError(
                    f"option 'machine': unknown key {key!r}{nearest(str(key), fields)}"
                )
            if key in ("encode_s", "decode_s"):
                found[key] = _rates(key, value)
            else:
                _check_rate(key, value, least=0.0 if key.endswith(("_s", "latency")) else None)
                found[key] = float(value)
        return cls(**found)

    def table(self) -> str:
        """As a profile file holds it."""
        rates = dataclasses.asdict(self)
        own = {k: v for k, v in rates.items() if not isinstance(v, Mapping)}
        parts = ["[machine]", *(f"{k} = {v:.6g}" for k, v in own.items())]
        for name in ("encode_s", "decode_s"):
            parts += ["", f"[machine.{name}]", *(f"{k} = {v:.6g}" for k, v in rates[name].items())]
        return "\n".join(parts) + "\n"


def machine_text(given: Any) -> str:
    """A mapping as it stands in a pipeline string: `flops=8e+10;encode_s.int8=1e-09`, what is not default.

    Raises:
        ValueError: as `Machine.parse` does.
    """
    machine, default = Machine.parse(given), Machine()
    words = []
    for field in dataclasses.fields(Machine):
        value, usual = getattr(machine, field.name), getattr(default, field.name)
        if isinstance(value, Mapping):
            words += [f"{field.name}.{k}={v!r}" for k, v in value.items() if v != usual[k]]
        elif value != usual:
            words.append(f"{field.name}={value!r}")
    return ";".join(words)


def _from_text(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        key, _, word = (part.strip() for part in item.partition("="))
        head, dot, scheme = key.partition(".")
        try:
            value: Any = float(word)
        except ValueError:
            value = word  # to be refused with its key
        if dot:
            found.setdefault(head, {})[scheme] = value
        else:
            found[head] = value
    return found


def _rates(key: str, value: Any) -> dict[str, float]:
    default = {"encode_s": _ENCODE_S, "decode_s": _DECODE_S}[key]
    if not isinstance(value, Mapping):
        raise ValueError(f"option 'machine': got {key}={value!r}; expected a mapping of schemes")
    for scheme, seconds in value.items():
        if scheme not in default:
            raise ValueError(
                f"option 'machine': {key} has no scheme {scheme!r}{nearest(str(scheme), default)}"
            )
        _check_rate(f"{key}.{scheme}", seconds, least=0.0)
    return {**default, **{k: float(v) for k, v in value.items()}}


def _check_rate(key: str, value: Any, least: float | None) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not number
        or not math.isfinite(value)
        or not (value > 0 if least is None else value >= least)
    ):
        wanted = "a positive number" if least is None else "a number, 0 or more"
        raise ValueError(f"option 'machine': got {key}={value!r}; expected {wanted}")


_UNITS = {
    "bandwidth": {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "gb": 1e9, "mb": 1e6},
    "latency": {"us": 1e-6, "ms": 1e-3, "ns": 1e-9, "s": 1.0},
    "memory": {"gb": 1e9, "mb": 1e6, "gib": 2.0**30, "mib": 2.0**20},
}


_EXAMPLES = {"bandwidth": "25Gbit", "latency": "20us", "memory": "2GiB"}


def quantity(kind: str, word: str) -> float:
    """`"25Gbit"` → bytes a second, `"20us"` → seconds, `"2GiB"` → bytes.

    Args:
        kind: `"bandwidth"`, `"latency"` or `"memory"`.

    Raises:
        ValueError: naming the units there are.
    """
    text = word.strip().lower().removesuffix("/s") if kind == "bandwidth" else word.strip().lower()
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    scale = _UNITS[kind].get(text[len(number) :].strip())
    try:
        value = float(number) * (scale or math.nan)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0 and (value > 0 or kind == "latency")):
        raise ValueError(
            f"{kind} {word!r}: expected a number and one of {', '.join(_UNITS[kind])}, such as "
            f"{_EXAMPLES[kind]!r}"
        )
    return value
