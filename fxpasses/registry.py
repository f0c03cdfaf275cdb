"""Passes by name, and the pipeline string that names them.

A pipeline string is `name{option=value,option=value},name,...`. A third party adds a pass with the
decorator `@register_pass` or with an entry point in the group `fxpasses.passes`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
import types
import typing
from typing import Any, TypeVar

from fxpasses.config import nearest
from fxpasses.passes.base import STAGES, Pass

ENTRY_POINT_GROUP = "fxpasses.passes"
PassType = TypeVar("PassType", bound=type[Pass])

_decorated: dict[str, type[Pass]] = {}


def register_pass(cls: PassType) -> PassType:
    """Class decorator that makes a pass known by its name.

    Raises:
        ValueError: when the class is not a frozen dataclass, its contract is malformed, or another class
            has its name.
    """
    _check_contract(cls)
    known = _decorated.get(cls.name) or _installed().get(cls.name)
    if known is not None and known.__qualname__ != cls.__qualname__:
        raise ValueError(
            f"pass name {cls.name!r} is taken by {known.__module__}.{known.__qualname__}"
        )
    _decorated[cls.name] = cls
    return cls


def passes() -> dict[str, type[Pass]]:
    """All known passes by name."""
    return {**_installed(), **_decorated}


@functools.cache
def _installed() -> dict[str, type[Pass]]:
    found: dict[str, type[Pass]] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        cls = entry.load()
        _check_contract(cls)
        if cls.name in found and found[cls.name] is not cls:
            raise ValueError(
                f"two installed passes have the name {cls.name!r}: {entry.value} is one"
            )
        found[cls.name] = cls
    return found


def _check_contract(cls: type[Pass]) -> None:
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ValueError(f"pass {cls.__qualname__}: a pass is a frozen dataclass")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", getattr(cls, "name", "")):
        raise ValueError(f"pass {cls.__qualname__}: `name` must be a lower-case identifier")
    if getattr(cls, "stage", None) not in STAGES:
        raise ValueError(f"pass {cls.name!r}: `stage` must be one of {', '.join(STAGES)}")
    if not cls.preserves_numerics and cls.error_bound is Pass.error_bound:
        raise ValueError(f"pass {cls.name!r} changes numerics: define `error_bound`")


def parse_pipeline(text: str) -> tuple[Pass, ...]:
    """`"bucketing{mb=25},gradient_sync"` → passes.

    Raises:
        ValueError: naming the place in the string, the pass or the option that is wrong.
    """
    found: list[Pass] = []
    position = 0
    pattern = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\{([^{}]*)\})?\s*(,|$)")
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            raise ValueError(
                f"option 'passes': can't read {text[position:]!r} (character {position + 1} of {text!r}); "
                "expected name{option=value,...}, separated by commas"
            )
        found.append(_make(match[1], match[2] or ""))
        position = match.end()
    return tuple(found)


def _make(name: str, options: str) -> Pass:
    known = passes()
    if name not in known:
        raise ValueError(f"option 'passes': unknown pass {name!r}{nearest(name, known)}")
    cls = known[name]
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in options.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"option 'passes': {name}{{{item}}}: expected option=value")
        if key not in fields:
            raise ValueError(
                f"option 'passes': pass {name!r} has no option {key!r}{nearest(key, fields)}"
            )
        given[key] = _convert(name, key, value, hints[key])
    return cls(**given)


def _convert(name: str, key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text == "None" and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if kind is str:
            return text
    wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise ValueError(f"option 'passes': {name}{{{key}={text}}}: expected {wanted}")
