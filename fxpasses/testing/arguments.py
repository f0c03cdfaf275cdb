"""What the tools for tests are given, checked before anything is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from fxpasses.config import nearest
from fxpasses.passes.base import Pass
from fxpasses.registry import check_contract, has_default


def known(what: str, name: Any, names: Iterable[str]) -> None:
    """Raise `ValueError` for a name that is none of these."""
    if name not in names:
        raise ValueError(f"{what}: {name!r}{nearest(str(name), names)}")


def instance(subject: Any) -> Pass:
    """A pass, by itself or by its class; `ValueError` for anything else."""
    cls = subject if isinstance(subject, type) else type(subject)
    if not issubclass(cls, Pass):
        raise ValueError(
            f"check_pass: {subject!r} is no pass; expected a subclass of `Pass`, or an instance"
        )
    check_contract(cls)
    if not isinstance(subject, type):
        return subject
    needed = [f.name for f in dataclasses.fields(cls) if not has_default(f)]
    if needed:
        raise ValueError(
            f"check_pass: pass {cls.name!r} has options without a default ({', '.join(needed)}); expected an "
            "instance"
        )
    return cls()


def listed(oracles: Any) -> tuple[Callable[..., Any], ...]:
    """Oracles, as they were given to `check_pass`."""
    found = tuple(oracles) if isinstance(oracles, Iterable) else (oracles,)
    if not isinstance(oracles, Iterable) or not all(callable(oracle) for oracle in found):
        raise ValueError(
            f"check_pass: oracles={oracles!r}; expected a list of functions that take a `Run`"
        )
    return found


def whole(name: str, value: Any, least: int) -> int:
    """A number that is large enough."""
    if type(value) is not int or value < least:
        raise ValueError(f"check_pass: {name}={value!r}; expected a whole number, {least} or more")
    return value
