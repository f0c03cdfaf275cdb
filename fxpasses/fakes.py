"""Fake values that stay true when nodes read another value than before, which may lie otherwise in memory.

What is computed from an expanded tensor, say, is dense: views of it have other strides than views of that, and
what is computed from those is laid out differently again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.graph import TrainingGraph


def read_instead(
    graph: TrainingGraph, readers: Iterable[fx.Node], old: fx.Node, new: fx.Node
) -> None:
    """Let nodes read another value, of the same shape."""
    readers = list(readers)
    for reader in readers:
        reader.replace_input_with(old, new)
    if not lie_alike(old.meta["val"], new.meta["val"]):
        refresh(graph, readers)


def refresh(graph: TrainingGraph, nodes: Iterable[fx.Node]) -> None:
    """Compute the fake values of nodes again, and of what reads one whose layout is another now."""
    pending = set(nodes)
    for node in graph.walk() if pending else ():
        if node in pending and recompute(graph, node):
            pending.update(node.users)


def recompute(graph: TrainingGraph, node: fx.Node) -> bool:
    """Compute a node's fake value from those that it reads; returns whether it lies otherwise in memory now.
    What an operator with subgraphs makes was traced with these, and stays.
    """
    if node.target is not operator.getitem and not isinstance(node.target, torch._ops.OpOverload):
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    old = node.meta["val"]
    with graph.fake_mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[arg-type]
    node.meta.pop("tensor_meta", None)
    return not lie_alike(old, node.meta["val"])


def lie_alike(one: Any, other: Any) -> bool:
    """Whether tensors, or those of two pytrees, have the same strides, as far as that is known."""
    ones, others = (
        [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        for value in (one, other)
    )
    return all(
        statically_known_true(s == t)
        for x, y in zip(ones, others, strict=True)
        for s, t in zip(x.stride(), y.stride(), strict=True)
    )
