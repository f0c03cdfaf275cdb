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
from collections.abc import Iterable, Set
from typing import Any, TypeVar

from fxpasses.config import Hardening, nearest
from fxpasses.passes.base import FROM_GROUP, STAGES, Pass
from fxpasses.patterns import OPTIONS, split

ENTRY_POINT_GROUP = "fxpasses.passes"
PassType = TypeVar("PassType", bound=type[Pass])

_decorated: dict[str, type[Pass]] = {}


def register_pass(cls: PassType) -> PassType:
    """Class decorator that makes a pass known by its name.

    Raises:
        ValueError: when the class is not a frozen dataclass, its contract is malformed, or another class
            has its name.
    """
    check_contract(cls)
    # By what they say of themselves: loading them here would go in circles while one is being loaded.
    installed = [e.value.replace(":", ".") for e in _entry_points() if e.name == cls.name]
    decorated = [_address(_decorated[cls.name])] if cls.name in _decorated else []
    for taken in installed + decorated:
        _check_clash(cls, taken)
    _decorated[cls.name] = cls
    return cls


def passes() -> dict[str, type[Pass]]:
    """All known passes by name."""
    return {**_installed(), **_decorated}


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


@functools.cache
def _installed() -> dict[str, type[Pass]]:
    found: dict[str, type[Pass]] = {}
    for entry in _entry_points():
        cls = entry.load()
        check_contract(cls)
        if entry.name != cls.name:
            raise ValueError(
                f"entry point {entry.name!r} in group {ENTRY_POINT_GROUP!r} must bear the name of its "
                f"pass, {cls.name!r}"
            )
        if cls.name in found:
            _check_clash(cls, _address(found[cls.name]))
        found[cls.name] = cls
    return found


def _check_clash(cls: type[Pass], taken_by: str) -> None:
    """A class may come again (its module was reloaded); another one of its name may not."""
    if taken_by != _address(cls):
        raise ValueError(
            f"pass name {cls.name!r} is taken by {taken_by}; {_address(cls)} needs another"
        )


def _address(cls: type[Pass]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def check_contract(cls: type[Pass]) -> None:
    """What a pass says of itself has to make sense, before it runs.

    Raises:
        ValueError: naming the pass and what is wrong.
    """
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ValueError(f"pass {cls.__qualname__}: a pass is a frozen dataclass")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", getattr(cls, "name", "")):
        raise ValueError(f"pass {cls.__qualname__}: `name` must be a lower-case identifier")
    if getattr(cls, "stage", None) not in STAGES:
        raise ValueError(f"pass {cls.name!r}: `stage` must be one of {', '.join(STAGES)}")
    if cls.run is Pass.run:
        raise ValueError(f"pass {cls.name!r}: define `run(self, graph)`")
    for attribute in ("requires", "provides", "conflicts", "inexact"):
        names = getattr(cls, attribute)
        if not isinstance(names, Set) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"pass {cls.name!r}: `{attribute}` is {names!r}; expected a set of names"
            )
    options = (field.name for field in dataclasses.fields(Hardening))
    known = {*FROM_GROUP, *options, "loss_scale_in_graph"}
    for field in dataclasses.fields(cls):
        key = field.metadata.get("environment")
        if key is not None and key not in known:
            raise ValueError(
                f"pass {cls.name!r}: field {field.name!r} comes from {key!r}{nearest(key, known)}"
            )
    if not cls.preserves_numerics and cls.error_bound is Pass.error_bound:
        raise ValueError(f"pass {cls.name!r} changes numerics: define `error_bound`")


def parse_pipeline(text: str) -> tuple[Pass, ...]:
    """`"bucketing{mb=25},gradient_sync"` → passes.

    Raises:
        ValueError: naming the place in the string, the pass or the option that is wrong.
    """
    if not text.strip():
        return ()
    found: list[Pass] = []
    position = 0
    pattern = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\{(" + OPTIONS + r")\})?\s*(,|$)")
    ended = False
    while not ended:
        match = pattern.match(text, position)
        if match is None:
            readable = re.compile(r"\s*(?:[A-Za-z_]\w*\s*(?:\{" + OPTIONS + r"\})?)?\s*").match(
                text, position
            )
            assert readable is not None
            position = readable.end()
            raise ValueError(
                f"option 'passes': can't read {text[position:]!r} (character {position + 1} of {text!r}); "
                "expected name{option=value,...}, separated by commas"
            )
        found.append(_make(match[1], match[2] or ""))
        position, ended = match.end(), match[3] == ""
    return tuple(found)


def _make(name: str, options: str) -> Pass:
    known = passes()
    if name not in known:
        raise ValueError(f"option 'passes': unknown pass {name!r}{nearest(name, known)}")
    cls = known[name]
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in split(options, ","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"option 'passes': {name}{{{item}}}: expected option=value")
        if key not in fields:
            raise ValueError(
                f"option 'passes': pass {name!r} has no option {key!r}{nearest(key, fields)}"
            )
        if fields[key].metadata.get("environment") in FROM_GROUP:
            raise ValueError(
                f"option 'passes': {name}{{{key}={value}}}: the process group decides this; leave it out"
            )
        if key in given:
            raise ValueError(f"option 'passes': pass {name!r} has option {key!r} twice")
        given[key] = _convert(name, key, value, hints[key])
    for field in dataclasses.fields(cls):
        if field.name not in given and not has_default(field):
            raise ValueError(
                f"option 'passes': pass {name!r} needs a value for option {field.name!r}"
            )
    return cls(**given)


def has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _convert(name: str, key: str, text: str, hint: Any) -> Any:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if is_union else (hint,)
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
