"""Which results share memory with what a node reads."""

from __future__ import annotations

import operator

import torch
from torch import fx

_UNSAID = (torch.ops.aten._unsafe_view.default,)  # their schemas do not say so


def shares_memory(node: fx.Node) -> bool:
    """Whether a result is a view of what the node reads, or one of several such."""
    if node.target is operator.getitem:
        return shares_memory(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return node.target in _UNSAID or any(r.alias_info is not None for r in returns)
