"""Sizes that vary (`mark_dynamic`): numbers for them, and whether what is known of them allows a number.

`ShapeEnv.guards`, `ShapeEnv.var_to_range` and `SymNode.expr` are private; checked on torch 2.13.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch

from fxpasses.graph import TrainingGraph
from fxpasses.sizes import SYMBOLIC, example

Sizes = Mapping[sympy.Symbol, int]
AS_TRACED: Sizes = types.MappingProxyType({})
_MORE = (1, 2, 3, 5)


def number(size: Any, sizes: Sizes = AS_TRACED) -> Any:
    """What a size stands for: with these numbers for its symbols, or as it was traced where none are given."""
    if not isinstance(size, SYMBOLIC) or not sizes:
        return example(size)
    kind = int if isinstance(size, torch.SymInt) else float
    return kind(size.node.expr.xreplace(sizes))


def other_sizes(graph: TrainingGraph) -> dict[sympy.Symbol, int]:
    """Numbers that the sizes of a graph's inputs may take beside those with which it was traced: each larger by
    the same; none where nothing varies, or where guards allow no such numbers.
    """
    traced: dict[sympy.Symbol, int] = {}
    met: set[sympy.Symbol] = set()
    for size in _symbolic(graph):
        met |= size.node.expr.free_symbols
        if isinstance(size.node.expr, sympy.Symbol) and size.node.hint is not None:
            traced[size.node.expr] = size.node.hint
    if met - traced.keys():
        return {}  # of some the number is not known
    for more in _MORE if traced else ():
        sizes = {symbol: size + more for symbol, size in traced.items()}
        if not refusals(graph, sizes):
            return sizes
    return {}


def refusals(graph: TrainingGraph, sizes: Sizes) -> list[str]:
    """The guards of a graph that don't hold with these numbers."""
    env = graph.fake_mode.shape_env
    assert env is not None
    guards = [guard.expr for guard in env.guards]
    guards += [
        sympy.And(r.lower <= s, s <= r.upper) for s, r in env.var_to_range.items() if s in sizes
    ]
    return [str(guard) for guard in guards if guard.xreplace(sizes) == sympy.false]


def _symbolic(graph: TrainingGraph) -> Iterator[Any]:
    for node, _ in graph.inputs():
        value = node.meta["val"]
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        yield from (size for size in sizes if isinstance(size, SYMBOLIC))
