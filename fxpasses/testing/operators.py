"""Operators of gradient graphs: the ATen calls of each, and how its result grows with the tangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
# An operator, or "getitem", and its arguments: "a" and "b" are those of the step, "_" is the result of the call
# before, "_0" that of the first.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
_Rule = Callable[[torch.Tensor, torch.Tensor], list[Call]]  # calls, by the values of the arguments
NEGATION: Call = (aten.neg.default, ("a",), {})


def degree(operator: str, a: int, b: int) -> int | None:
    """Of a step's result: 1 if it grows with the tangents as they do, 0 if it does not depend on them; None
    if neither.

    Args:
        a, b: the degrees of its arguments.
    """
    if operator in ("mul", *_PRODUCTS):
        return a + b if a + b < 2 else None
    if operator in ("add", "bias", "where", "cat"):
        return a if a == b else None
    if operator in (
        "sin",
        "exp",
        "large",
        "huge",
        "largest",
        "limit",
        "norm",
        "chosen",
        "statistics",
    ):
        return None if a else 0
    if operator in ("mask", "dropped", "kept"):
        return None if a else b
    return a


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _cast(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], list[Call]]:
    return lambda a, b: [(aten._to_copy.default, ("a",), {"dtype": dtype})]


def _mask(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """The elements of `b` where `a` is large enough, by a mask of numbers as dropout has it."""
    as_numbers = (aten._to_copy.default, ("_",), {"dtype": b.dtype})
    product: Call = (aten.mul.Tensor, ("_", "b"), {})
    return [(aten.gt.Scalar, ("a", 0.1), {}), as_numbers, product] if _alike(a, b) else []


def _scaled_mask(operator: Any, number: float, first: str, second: str) -> _Rule:
    """A mask that keeps the mean, as dropout has it."""

    def calls(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
        found = _mask(a, b)[:-1]
        return (
            [*found, (operator, ("_", number), {}), (aten.mul.Tensor, (first, second), {})]
            if found
            else []
        )

    return calls


def _drawn(*multiple: Call, like: bool = False) -> _Rule:
    """Some elements, drawn with one probability."""

    def calls(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
        memory: Call = (aten.empty.memory_format, (list(a.shape),), {"dtype": a.dtype})
        if like:
            memory = (aten.empty_like.default, ("a",), {})
        draw: Call = (aten.bernoulli.p, ("_", 0.5), {})
        fits = a.dtype == torch.float32
        return [memory, draw, *multiple, (aten.mul.Tensor, ("a", "_"), {})] if fits else []

    return calls


def _chosen(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """Some elements, drawn with probabilities of their own, which are never low."""
    calls: list[Call] = [(aten.sigmoid.default, ("a",), {}), (aten.nan_to_num.default, ("_",), {})]
    draw: Call = (aten.bernoulli.default, ("_",), {})
    return [*calls, draw, (aten.mul.Tensor, ("a", "_"), {})] if a.dtype == torch.float32 else []


def _norm(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """A batch norm."""
    arguments = ("a", None, None, True, 0.1, 1e-5)
    fits = a.dim() == 2 and a.dtype == torch.float32 and a.shape[0] > 1 and a.numel()
    norm: Call = (aten._native_batch_norm_legit.no_stats, arguments, {})
    return [norm, ("getitem", ("_", 0), {})] if fits else []


def _dropout(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """Dropout as one operator, times its mask."""
    return [
        (aten.native_dropout.default, ("a", 0.5, True), {}),
        ("getitem", ("_", 0), {}),
        ("getitem", ("_0", 1), {}),
        (aten._to_copy.default, ("_",), {"dtype": a.dtype}),
        (aten.mul.Tensor, ("_1", "_"), {}),
    ]


def _pool(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """The largest of pairs, times where they stand."""
    if a.dim() not in (2, 3) or a.dtype != torch.float32 or not a.numel() or a.shape[-1] < 2:
        return []
    calls: list[Call] = [(aten.unsqueeze.default, ("a", 0), {})] if a.dim() == 2 else []
    values, places = (f"_{len(calls) + 1}", f"_{len(calls) + 3}")
    return [
        *calls,
        (aten.max_pool2d_with_indices.default, ("_" if calls else "a", [1, 2]), {}),
        ("getitem", ("_", 0), {}),
        ("getitem", (f"_{len(calls)}", 1), {}),
        (aten._to_copy.default, ("_",), {"dtype": a.dtype}),
        (aten.mul.Tensor, (values, places), {}),
    ]


def _statistics(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """The fp32 statistics of attention in bfloat16."""
    if a.dim() != 2 or a.dtype != torch.float32 or not a.numel():
        return []
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    return [
        (aten._to_copy.default, ("a",), {"dtype": torch.bfloat16}),
        (aten.clone.default, ("_",), {"memory_format": torch.contiguous_format}),
        (aten.unsqueeze.default, ("_", 0), {}),
        (aten.unsqueeze.default, ("_", 0), {}),
        (attention, ("_", "_", "_"), {}),
        ("getitem", ("_", 1), {}),
    ]


def _scaled(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    constant: Call = (aten.full.default, ([], 0.5), {"dtype": a.dtype})
    return [constant, (aten.mul.Tensor, ("a", "_"), {})]


def _halves(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """The sum of each half, added up."""
    if not a.dim() or a.shape[0] < 2:
        return []
    calls: list[Call] = [(aten.split.Tensor, ("a", a.shape[0] // 2), {})]
    for half in (0, 1):
        calls += [("getitem", ("_0", half), {}), (aten.sum.default, ("_",), {})]
    return [*calls, (aten.add.Tensor, ("_2", "_4"), {})]


def _product(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    fits = a.dim() == b.dim() == 2 and a.dtype == b.dtype and a.shape[0] == b.shape[0]
    return (
        [(aten.permute.default, ("a", [1, 0]), {}), (aten.mm.default, ("_", "b"), {})]
        if fits
        else []
    )


def _added(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """A product that is added to one."""
    found = _product(a, b)
    return [*found, (aten.addmm.default, ("_", "_0", "b"), {})] if found else []


def _batched(a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """The same of batches, of one product each."""
    if not _product(a, b):
        return []
    return [
        (aten.permute.default, ("a", [1, 0]), {}),
        (aten.unsqueeze.default, ("_", 0), {}),
        (aten.unsqueeze.default, ("b", 0), {}),
        (aten.bmm.default, ("_1", "_2"), {}),
        (aten.baddbmm.default, ("_3", "_1", "_2"), {}),
    ]


_STEPS: dict[str, _Rule] = {
    "neg": lambda a, b: [NEGATION],
    "double": lambda a, b: [(aten.mul.Tensor, ("a", 2), {})],
    "sin": lambda a, b: [(aten.sin.default, ("a",), {})],
    "exp": lambda a, b: [(aten.exp.default, ("a",), {})],
    "large": lambda a, b: [(aten.add.Tensor, ("a", 1e5), {})],
    "huge": lambda a, b: (
        [(aten.full.default, ([], 1e5), {"dtype": a.dtype}), (aten.add.Tensor, ("a", "_"), {})]
        if a.dtype == torch.float32  # more than float16 holds
        else []
    ),
    "relu": lambda a, b: [(aten.relu.default, ("a",), {})],
    "scaled": _scaled,
    "mask": _mask,
    "where": lambda a, b: (
        [(aten.gt.Scalar, ("a", 0), {}), (aten.where.self, ("_", "a", "b"), {})]
        if _alike(a, b)
        else []
    ),
    "cat": lambda a, b: [(aten.cat.default, (["a", "b"],), {})] if a.dim() and _alike(a, b) else [],
    "halves": _halves,
    "add": lambda a, b: [(aten.add.Tensor, ("a", "b"), {})] if _alike(a, b) else [],
    "mul": lambda a, b: [(aten.mul.Tensor, ("a", "b"), {})] if _alike(a, b) else [],
    "product": _product,
    "transpose": lambda a, b: [(aten.permute.default, ("a", list(range(a.dim()))[::-1]), {})],
    "flatten": lambda a, b: (
        [(aten.view.default, ("a", [-1]), {})] if a.numel() and a.is_contiguous() else []
    ),
    "total": lambda a, b: [(aten.sum.default, ("a",), {})],
    "sum": lambda a, b: [(aten.sum.dim_IntList, ("a", [0]), {})] if a.dim() else [],
    "expand": lambda a, b: [(aten.expand.default, ("a", [2, *a.shape]), {})] if a.dim() < 3 else [],
    "unsqueeze": lambda a, b: [(aten.unsqueeze.default, ("a", 0), {})] if a.dim() < 3 else [],
    "rest": lambda a, b: [(aten.slice.Tensor, ("a", 0, 1), {})] if a.dim() and a.shape[0] else [],
    "bfloat16": _cast(torch.bfloat16),
    "float32": _cast(torch.float32),
    "float64": _cast(torch.float64),
    "max": lambda a, b: (
        [(aten.max.dim, ("a", 0), {}), ("getitem", ("_", 0), {})]
        if a.dim() and a.shape[0] and a.numel()
        else []
    ),
}
# For who asks for them: few operators take complex values, and the rest matters to few passes.
_RARE: dict[str, _Rule] = {
    "complex64": _cast(torch.complex64),
    "scalar": lambda a, b: [
        (aten.scalar_tensor.default, (0.5,), {"dtype": a.dtype}),
        (aten.mul.Tensor, ("a", "_"), {}),
    ],
    "largest": lambda a, b: [(aten.add.Tensor, ("a", 65504.0), {})],  # that float16 holds
    "limit": lambda a, b: (
        [(aten.full.default, ([], 65504.0), {"dtype": a.dtype}), (aten.add.Tensor, ("a", "_"), {})]
        if a.dtype == torch.float32
        else []
    ),
    "one": lambda a, b: [
        (aten.full.default, ([1] * a.dim(), 0.5), {"dtype": a.dtype}),
        (aten.mul.Tensor, ("a", "_"), {}),
    ],
    "bounded": lambda a, b: [(aten.clamp_max.default, ("a", float("inf")), {})],
    "unbounded": lambda a, b: [
        (aten.full.default, ([], float("inf")), {"dtype": a.dtype}),
        (aten.minimum.default, ("a", "_"), {}),
    ],
    "half": lambda a, b: _halves(a, b)[:2],
    "bias": lambda a, b: (
        [(aten.add.Tensor, ("a", "b"), {})]
        if b.dim() == 1 < a.dim() and a.dtype == b.dtype and a.shape[-1] == b.shape[0]
        else []
    ),
    "dropped": _scaled_mask(aten.mul.Tensor, 2.0, "_", "b"),
    "kept": _scaled_mask(aten.div.Tensor, 0.5, "b", "_"),
    "drawn": _drawn(),
    "drawn_like": _drawn(like=True),
    "drawn_twice": _drawn((aten.mul.Tensor, ("_", 2.0), {})),
    "drawn_over": _drawn((aten.div.Tensor, ("_", 0.5), {})),
    "chosen": _chosen,
    "dropout": _dropout,
    "norm": _norm,
    "pool": _pool,
    "statistics": _statistics,
}
# Other forms of products.
_PRODUCTS: dict[str, _Rule] = {
    "product": _product,
    "added": _added,
    "batched": lambda a, b: _batched(a, b)[:-1],
    "batched_added": _batched,
}
OPERATORS, RARE, PRODUCTS = tuple(_STEPS), tuple(_RARE), tuple(_PRODUCTS)
# Those that read both of their arguments.
TAKE_TWO = ("mask", "where", "cat", "add", "mul", "bias", "dropped", "kept", *PRODUCTS)
_RULES = _STEPS | _RARE | _PRODUCTS
ALL = tuple(_RULES)


def calls(operator: str, a: torch.Tensor, b: torch.Tensor) -> list[Call]:
    """What a step calls, one after the other; nothing if the operator does not fit these arguments."""
    return _RULES[operator](a, b)
