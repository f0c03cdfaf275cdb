"""Nodes as lines of Python, each with what it is and where it comes from.

    bucket0_cat = torch.ops.aten.cat.default([view, view_1])  # float32[20]  bucketing/flatten of mm for 0.bias
    ── code ────────────────────────────────────────────────    ── value ─  ── pass/rule, source, parameter ────

Paths are relative to the current directory or to where a library is installed, so that they are the same
wherever the program lies. Behind all this stands the line of the model.

`torch._library.custom_ops.OPDEFS` is private; checked on torch 2.13.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import site
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS

from fxpasses.dynamo import module_of
from fxpasses.rewrite import Provenance, model_line

_SHOWN_PARAMETERS = 3


def call_of(node: fx.Node) -> str:
    """The right-hand side of a node's line."""
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{literal(node.args[0])}[{literal(node.args[1])}]"
    arguments = [literal(value) for value in node.args]
    arguments += [f"{key}={literal(value)}" for key, value in node.kwargs.items()]
    return f"{callee(node.target)}({', '.join(arguments)})"


def callee(target: Any) -> str:
    """What is called, as an expression."""
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    return f"{target.__module__}.{target.__qualname__}"


def literal(value: Any) -> str:
    """An argument as an expression; a node is its name."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
    if inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"  # its repr holds an address
    return repr(value)


def registered_by(target: torch._ops.OpOverload) -> set[str]:
    """The module that has to be imported for an operator written in Python to be known."""
    if target.namespace == "prims" and not hasattr(torch._prims, target._opname):
        return {"torch._inductor.inductor_prims"}
    definition = OPDEFS.get(target._schema.name)
    return {definition._init_fn.__module__} if definition else set()


def attribute(module: fx.GraphModule, path: str) -> Any:
    """What a `get_attr` node reads."""
    return operator.attrgetter(path)(module)


def comment_of(node: fx.Node) -> str:
    """What a node is and where it comes from."""
    provenance = node.meta.get("provenance")
    origin = origin_of(provenance) if provenance else program_origin(node)
    return on_one_line("  ".join(filter(None, (value_text(node.meta.get("val")), origin))))


def on_one_line(comment: str) -> str:
    """A comment that ends with its line: names of modules may hold any character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in comment)


def program_origin(node: fx.Node) -> str:
    """`in layers.0 (model.py:12)`: the module and line of the program's own node."""
    line, module = short_line(model_line(node)), module_of(node)
    where = f"in {module}" if module else ""
    return f"{where} ({line})" if where and line else where or line


def value_text(value: Any) -> str:
    """`float32[16, 8]`; a symbolic size by its symbol."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(value_text, value))})"
    return "" if value is None else f"{type(value).__name__} {value}"


def origin_of(provenance: Provenance) -> str:
    """`bucketing/fill of mm for 0.weight (model.py:12)`."""
    names = provenance.parameters
    more = len(names) - _SHOWN_PARAMETERS
    shown = ", ".join(names[:_SHOWN_PARAMETERS]) + (f" and {more} more" if more > 0 else "")
    return "".join(
        (
            "/".join(filter(None, (provenance.pass_name, provenance.rule))),
            f" of {provenance.source}" if provenance.source else "",
            f" for {shown}" if shown else "",
            f" ({line})" if (line := short_line(provenance.model_line)) else "",
        )
    )


def short_line(line: str) -> str:
    """`file:line` without what is different on another machine."""
    return _short_line(line, os.getcwd())


@functools.lru_cache(maxsize=4096)
def _short_line(line: str, current: str) -> str:
    path, _, number = line.rpartition(":")
    for root in (*_libraries(), f"{current}/"):
        if path.startswith(root):
            return f"{path[len(root) :]}:{number}"
    return line


@functools.cache
def _libraries() -> tuple[str, ...]:
    where_torch_is = Path(torch.__file__).parent.parent
    roots = (*site.getsitepackages(), where_torch_is, sysconfig.get_path("stdlib"))
    return tuple(f"{root}/" for root in roots)
