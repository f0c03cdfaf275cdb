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


def may_be_random(node: fx.Node) -> bool:
    """Whether its operator draws random numbers, at some arguments; torch takes that for an effect."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]


def is_random(node: fx.Node) -> bool:
    """Whether it draws random numbers, at the arguments that it has."""
    if not may_be_random(node):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    return given.get("dropout_p", 1) != 0 and given.get("train", True) is not False
