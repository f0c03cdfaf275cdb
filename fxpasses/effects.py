"""Which nodes do something besides computing a value: dead-code elimination must keep them."""

from __future__ import annotations

import torch
from torch import fx

COLLECTIVE_NAMESPACE = "_c10d_functional"


def is_collective(node: fx.Node) -> bool:
    """A functional collective, waits included."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == COLLECTIVE_NAMESPACE
    )


def is_wait(node: fx.Node) -> bool:
    return is_collective(node) and node.target is torch.ops._c10d_functional.wait_tensor.default


def is_launch(node: fx.Node) -> bool:
    """A collective that starts communication: each rank must issue it, whoever reads the result."""
    return is_collective(node) and not is_wait(node)


def is_effectful(node: fx.Node) -> bool:
    """Collectives, operators that write an input, and nodes that a pass marked with `meta["effect"]`."""
    return is_collective(node) or "effect" in node.meta or node.is_impure()
