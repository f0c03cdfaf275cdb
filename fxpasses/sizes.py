"""Sizes that are no numbers while a graph is compiled: those that vary, and those that only data decide.

`SymNode.expr`, `SymNode.hint` and `ShapeEnv.backed_var_to_val` are private; checked on torch 2.11,
2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    guard_or_false,
    statically_known_true,
)

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# In place of each size that only data decide, where some number has to do.
SOME = 2


def example(size: Any) -> Any:
    """The number with which a size was traced; of one that only data decide, what it is with `SOME`."""
    if not isinstance(size, SYMBOLIC):
        return size
    if size.node.hint is not None:
        return size.node.hint
    known = size.node.expr.xreplace(size.node.shape_env.backed_var_to_val)
    return size.node.pytype(known.xreplace(dict.fromkeys(known.free_symbols, SOME)))


def are_known(sizes: Iterable[Any]) -> bool:
    """Whether all of them are numbers when the graph is compiled."""
    return not any(isinstance(size, torch.SymInt) for size in sizes)


def depends_on_data(size: Any) -> bool:
    """Whether it is known only when the graph runs."""
    return bool(free_unbacked_symbols(size))


def has_elements(x: torch.Tensor) -> bool:
    """Whether there is an element, as far as that is known. A size that varies is held to it by a guard."""
    return bool(guard_or_false(x.numel() != 0))


def has_one_element(x: torch.Tensor) -> bool:
    """The same of exactly one."""
    return bool(guard_or_false(x.numel() == 1))


def may_have_elements(x: torch.Tensor) -> bool:
    """Whether there may be one; asks for no guard."""
    return not statically_known_true(x.numel() == 0)
