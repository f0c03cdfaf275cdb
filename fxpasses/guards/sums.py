"""Gradients that are sums, of biases, norms and embeddings: added up a second time, in fp64.

    sum over rows        c = x^T 1                    embedding        C = x^T B,  B[t, index[t]] = 1
    layer norm, weight   c = (dy * normal(x))^T 1     convolution's bias, layer norm's: sums over rows

They are products with a matrix whose rows have the sum 1, and are held to the bound of such (`products.py`).
The second sum is in another dtype, so no compiler merges it with the first; it reads what that reads, in one
loop. torch's operators for embeddings and norms round partial sums to the dtype of the gradient.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.graph import TrainingGraph
from fxpasses.guards.products import WIDE, disagrees
from fxpasses.precision import CLEAR, class_of, operator_name
from fxpasses.sizes import are_known

Check = tuple[Callable[..., Tensor], tuple[Any, ...]]  # tensor code, what it is called with


def makers(graph: TrainingGraph) -> dict[fx.Node, tuple[str, ...]]:
    """What makes the gradients, views left out, with the parameters they are of."""
    found: dict[fx.Node, tuple[str, ...]] = {}
    for gradient in graph.gradients():
        node = gradient.node
        while node.op == "call_function" and _is_view(node):
            (node,) = node.all_input_nodes
        value = node.meta["val"]
        if node.op == "call_function" and value.is_floating_point() and value.numel() != 0:
            found[node] = (*found.get(node, ()), gradient.parameter)
    return found


def check_of(node: fx.Node) -> Check | None:
    """The check of a sum; None for anything else."""
    if node.target is operator.getitem:
        whole, at = _arguments(node)
        part = _PARTS.get((operator_name(whole), at))
        return None if part is None else part(node, whole)
    reader = _READERS.get(operator_name(node))
    return None if reader is None else reader(node)


def _is_view(node: fx.Node) -> bool:
    is_part = node.target is operator.getitem
    return not is_part and len(node.all_input_nodes) == 1 and class_of(node) == CLEAR


def _differ(c: Tensor, a: Tensor, accumulator: torch.dtype | None = None) -> Tensor:
    """Whether a row of c, [M, N], has another sum than that of a, [M, K].

    Args:
        accumulator: None: c's own dtype.
    """
    return disagrees(c, a, 1.0, 1.0, accumulator=accumulator or c.dtype, wide=WIDE)


def _sum(node: fx.Node) -> Check | None:
    x = _arguments(node)[0]
    value, result = x.meta["val"], node.meta["val"]
    if value.dtype != result.dtype or not are_known(value.shape):
        return None
    given: Any = node.args[1] if len(node.args) > 1 else None
    dims = {d % value.dim() for d in given or range(value.dim())}
    kept = [d for d in range(value.dim()) if d not in dims]
    order = [*kept, *sorted(dims)]
    rows = math.prod(value.shape[d] for d in kept)

    def check(c: Tensor, x: Tensor) -> Tensor:
        return _differ(c.reshape(rows, 1), x.permute(order).reshape(rows, -1), torch.float32)

    return check, (node, x)


def _embedding(node: fx.Node) -> Check | None:
    values, indices, _, padding, by_frequency = _arguments(node)
    if by_frequency:
        return None

    def check(c: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        kept = torch.where(indices.ne(padding).unsqueeze(-1), x, 0)
        return _differ(c.mT, kept.reshape(-1, c.shape[-1]).mT)

    return _known(check, node, values, indices)


def _scattered(node: fx.Node) -> Check | None:
    """What Inductor's decomposition makes of an embedding's gradient."""
    start, mask, indices, values = _arguments(node)
    if not _is_zero(start) or len(indices) != 1 or node.meta["val"].dim() != 2:
        return None

    def check(c: Tensor, mask: Tensor, x: Tensor) -> Tensor:
        return _differ(c.mT, torch.where(mask, x, 0).reshape(-1, c.shape[-1]).mT)

    return _known(check, node, mask, values)


def _norm_weight(node: fx.Node, whole: fx.Node) -> Check | None:
    x, before, _, mean, rstd = _arguments(whole)[:5]

    def check(c: Tensor, x: Tensor, before: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        terms = x.to(WIDE) * ((before.to(WIDE) - mean) * rstd)
        return _differ(c.reshape(-1, 1), terms.reshape(-1, c.numel()).mT)

    return _known(check, node, x, before, mean, rstd)


def _norm_bias(node: fx.Node, whole: fx.Node) -> Check | None:
    return _known(
        lambda c, x: _differ(c.reshape(-1, 1), x.reshape(-1, c.numel()).mT), node, whole.args[0]
    )


def _convolution_bias(node: fx.Node, whole: fx.Node) -> Check | None:
    return _known(
        lambda c, x: _differ(c.reshape(-1, 1), x.transpose(0, 1).flatten(1)), node, whole.args[0]
    )


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _known(check: Callable[..., Tensor], *nodes: Any) -> Check | None:
    """The check, if all sizes are known."""
    values = [node.meta["val"] for node in nodes]
    sized = all(are_known(value.shape) for value in values)
    return (check, nodes) if sized else None


def _is_zero(node: Any) -> bool:
    return isinstance(node, fx.Node) and operator_name(node) == "full" and not node.args[1]


_READERS = {
    "sum": _sum,
    "embedding_dense_backward": _embedding,
    "_unsafe_masked_index_put_accumulate": _scattered,
}
_PARTS = {
    ("native_layer_norm_backward", 1): _norm_weight,
    ("native_layer_norm_backward", 2): _norm_bias,
    ("convolution_backward", 2): _convolution_bias,
}
