"""Gradient graphs as plain data: a few tangents, operators between them, and which values are gradients.

Far cheaper than capturing a program (milliseconds), and free to be odd: one node that is the gradient of two
parameters, a tangent that is one itself, gradients that are empty, 0-dim, expanded or strided. As in every
backward, tangents that are twice as large make values that are twice as large, or that don't depend on them.
Every list of numbers is a graph: a step that does not fit its arguments becomes a negation, so that shrinking
never leaves the valid ones.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fxpasses.graph import BUFFER_STATE, Role, StateSpec, TrainingGraph

aten = torch.ops.aten
LAYOUTS = ("contiguous", "transposed", "rotated", "strided", "expanded")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An input: its shape, dtype and layout in memory (one of `LAYOUTS`)."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"

    def stride(self) -> tuple[int, ...]:
        order = list(range(len(self.shape)))
        if self.layout == "transposed":
            order.reverse()
        if self.layout == "rotated":  # from three dimensions on, not its own inverse
            order = order[1:] + order[:1]
        step = 2 if self.layout == "strided" else 1
        strides = dict.fromkeys(order, 0)
        for dimension in reversed(order):
            strides[dimension] = step
            step *= max(self.shape[dimension], 1)
        if self.layout == "expanded" and self.shape:
            strides[0] = 0
        return tuple(strides[d] for d in range(len(self.shape)))

    def empty(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        return torch.empty_strided(self.shape, self.stride(), dtype=dtype)

    def source(self) -> str:
        return f"torch.empty_strided({self.shape}, {self.stride()}, dtype=torch.{self.dtype})"


@dataclasses.dataclass(frozen=True)
class Step:
    """An operator and its arguments: positions among the values so far, counted round and round."""

    operator: str
    a: int = 0
    b: int = 0


@dataclasses.dataclass(frozen=True)
class GradientGraph:
    """A backward graph.

    Attributes:
        tangents, saved: its inputs.
        steps: what it computes.
        gradients: for each parameter the position of its gradient among the values; None: it has none.
        input_gradients: positions of the gradients of inputs, which nobody reduces.
        buffers: those that the forward wrote.
        whole_step: whether this is the graph of a function that calls `backward()`: then it has inputs in place
            of tangents, and writes the buffers itself.
    """

    tangents: tuple[Leaf, ...]
    steps: tuple[Step, ...] = ()
    gradients: tuple[int | None, ...] = ()
    saved: tuple[Leaf, ...] = ()
    input_gradients: tuple[int, ...] = ()
    buffers: tuple[Leaf, ...] = ()
    whole_step: bool = False

    def build(self) -> TrainingGraph:
        """The graph; each build is a new one, equal to the others."""
        return _Builder(self).build()

    def source(self) -> str:
        """The graph as a script that runs alone."""
        return _render(self)


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
_Rule = Callable[[torch.Tensor, torch.Tensor], list[Call]]  # calls, by the values of the arguments
_NEGATION: Call = (aten.neg.default, ("a",), {})


def _degree(operator: str, a: int, b: int) -> int | None:
    """Of a step's result: 1 if it grows with the tangents as they do, 0 if it does not depend on them; None
    if neither.

    Args:
        a, b: the degrees of its arguments.
    """
    if operator in ("mul", "product"):
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


_STEPS: dict[str, _Rule] = {
    "neg": lambda a, b: [_NEGATION],
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
OPERATORS, RARE = tuple(_STEPS), tuple(_RARE)


class _Builder:
    def __init__(self, spec: GradientGraph) -> None:
        self.spec = spec
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.values: list[fx.Node] = []
        self.degrees: dict[fx.Node, int] = {}
        self.written: list[fx.Node] = []

    def build(self) -> TrainingGraph:
        first = "input" if self.spec.whole_step else "tangent"
        for kind, leaves in ((first, self.spec.tangents), ("saved", self.spec.saved)):
            for position, leaf in enumerate(leaves):
                name = f"{kind}s_{position}"
                self.values.append(self._placeholder(name, Role(kind, name), leaf))
                self.degrees[self.values[-1]] = int(kind == first)
        held = self._held_buffers()
        for step in self.spec.steps:
            self.values.append(self._step(step))
            self._write_next(held)
        while held:
            self._write_next(held)
        values, roles = zip(*self._outputs(), strict=True) if self._outputs() else ((), ())
        self.graph.output(tuple(values)).meta["roles"] = tuple(roles)
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        module.meta.update(fake_mode=self.mode, written_buffers=self._buffers())
        return TrainingGraph(module)

    def _placeholder(self, name: str, role: Role, leaf: Leaf) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta.update(role=role, val=leaf.empty())
        return node

    def _held_buffers(self) -> list[fx.Node]:
        """The inputs that a whole step is going to write."""
        held = enumerate(self.spec.buffers if self.spec.whole_step else ())
        return [self._placeholder(f"buffers_{i}", Role("buffer", _buffer(i)), b) for i, b in held]

    def _write_next(self, held: list[fx.Node]) -> None:
        if held:
            self.written.append(self._call(aten.add.Tensor, (held.pop(0), 1), {}))

    def _pick(self, position: int) -> fx.Node:
        return self.values[position % len(self.values)]

    def _step(self, step: Step) -> fx.Node:
        a, b = self._pick(step.a), self._pick(step.b)
        degree = _degree(step.operator, self.degrees[a], self.degrees[b])
        calls = (_STEPS | _RARE)[step.operator](a.meta["val"], b.meta["val"])
        if not calls or degree is None:
            calls, degree = [_NEGATION], self.degrees[a]
        named = {"a": a, "b": b}
        for position, (target, args, kwargs) in enumerate(calls):
            filled = fx.node.map_aggregate(args, lambda x: named[x] if isinstance(x, str) else x)
            named["_"] = named[f"_{position}"] = self._call(target, filled, kwargs)
        self.degrees[named["_"]] = degree
        return named["_"]

    def _call(self, target: Any, args: Any, kwargs: dict[str, Any]) -> fx.Node:
        function = operator.getitem if target == "getitem" else target
        node = self.graph.call_function(function, args, kwargs)
        with self.mode:
            node.meta["val"] = function(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def _outputs(self) -> list[tuple[fx.Node | None, Role]]:
        written: list[tuple[fx.Node | None, Role]] = [
            (node, Role("mutation", _buffer(i))) for i, node in enumerate(self.written)
        ]
        own = [
            (None if at is None else self._pick(at), Role("gradient", parameter_name(i)))
            for i, at in enumerate(self.spec.gradients)
        ]
        inputs = [
            (self._pick(at), Role("input_gradient", f"x{i}"))
            for i, at in enumerate(self.spec.input_gradients)
        ]
        return written + own + inputs

    def _buffers(self) -> tuple[StateSpec, ...]:
        cpu = torch.device("cpu")
        return tuple(
            StateSpec(BUFFER_STATE, _buffer(i), b.shape, getattr(torch, b.dtype), cpu)
            for i, b in enumerate(self.spec.buffers)
        )


def parameter_name(position: int) -> str:
    return f"layer{position}.weight"


def _buffer(position: int) -> str:
    return f"norm{position}.running"


def _render(spec: GradientGraph) -> str:
    graph = spec.build()
    lines = [
        "import torch",
        "",
        "",
        "def backward({}):".format(", ".join(n.name for n, _ in graph.inputs())),
    ]
    for node in graph.walk():
        lines.append(f"    {node.name} = {_render_call(node)}")
    names = [str(node) for _, node, _ in graph.outputs()]
    lines.append(f"    return ({''.join(name + ', ' for name in names)})")
    roles = ", ".join(f"{role.kind} {role.name}" for _, _, role in graph.outputs())
    lines += ["", "", f"# outputs: {roles or 'none'}"]
    lines += [f"# writes: {b.name} {b.dtype}{list(b.shape)}" for b in graph.written_buffers]
    leaves = spec.tangents + spec.saved + (spec.buffers if spec.whole_step else ())
    lines += [
        f"{n.name} = {leaf.source()}" for (n, _), leaf in zip(graph.inputs(), leaves, strict=True)
    ]
    arguments = ", ".join(n.name for n, _ in graph.inputs())
    lines += [f"print(backward({arguments}))", "", f"# as data: {spec!r}"]
    return "\n".join(lines)


def _render_call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{node.args[0]}[{node.args[1]}]"
    arguments = [str(list(a)) if isinstance(a, Sequence) else str(a) for a in node.args]
    arguments += [f"{key}={value}" for key, value in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join(arguments)})"
