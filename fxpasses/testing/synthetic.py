"""Gradient graphs as plain data: a few tangents, operators between them, and which values are gradients.

Far cheaper than capturing a program (milliseconds), and free to be odd: one node that is the gradient of two
parameters, a tangent that is one itself, gradients that are empty, 0-dim, expanded or strided. As in every
backward, tangents that are twice as large make values that are twice as large, or that don't depend on them.
Every list of numbers is a graph: a step that does not fit its arguments becomes a negation, so that shrinking
never leaves the valid ones.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fxpasses.graph import BUFFER_STATE, Role, StateSpec, TrainingGraph
from fxpasses.testing import operators
from fxpasses.testing.arguments import known

aten = torch.ops.aten
LAYOUTS = ("contiguous", "transposed", "rotated", "strided", "expanded")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An input: its shape, dtype (of torch, by name) and layout in memory (one of `LAYOUTS`)."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(
                f"Leaf: dtype={self.dtype!r}; expected one of torch's, such as 'float32'"
            )
        known("Leaf: layout", self.layout, LAYOUTS)

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
        value = self.empty()
        numel = value.untyped_storage().nbytes() // value.element_size()
        drawn = f"torch.randn({numel}).to(torch.{self.dtype})"
        return f"{drawn}.as_strided({self.shape}, {self.stride()})"


@dataclasses.dataclass(frozen=True)
class Step:
    """An operator (one of `operators.ALL`) and its arguments: positions among the values so far, counted round
    and round.
    """

    operator: str
    a: int = 0
    b: int = 0

    def __post_init__(self) -> None:
        known("Step: operator", self.operator, operators.ALL)


@dataclasses.dataclass(frozen=True)
class GradientGraph:
    """A backward graph, or a joint one.

    Attributes:
        tangents, saved: its inputs. In a joint graph what is saved is an input of the program.
        steps: what it computes.
        gradients: for each parameter the position of its gradient among the values; None: it has none.
        input_gradients: positions of the gradients of inputs, which nobody reduces.
        buffers: those that the forward wrote.
        whole_step: whether this is the graph of a function that calls `backward()`: then it has inputs in place
            of tangents, and writes the buffers itself.
        outputs: of the program, as positions among the values that don't depend on tangents; with these the
            graph is a joint one.
    """

    tangents: tuple[Leaf, ...]
    steps: tuple[Step, ...] = ()
    gradients: tuple[int | None, ...] = ()
    saved: tuple[Leaf, ...] = ()
    input_gradients: tuple[int, ...] = ()
    buffers: tuple[Leaf, ...] = ()
    whole_step: bool = False
    outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        reads = self.steps or self.input_gradients or any(g is not None for g in self.gradients)
        if reads and not self.tangents + self.saved:
            raise ValueError(
                "GradientGraph: no tangents, nothing saved; expected a value to begin with"
            )

    def build(self) -> TrainingGraph:
        """The graph; each build is a new one, equal to the others."""
        return _Builder(self).build()

    def source(self) -> str:
        """The graph as a script that runs alone."""
        return _render(self)


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
        second = "input" if self.spec.outputs else "saved"
        for kind, leaves in ((first, self.spec.tangents), (second, self.spec.saved)):
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
        graph = TrainingGraph(module)
        graph.eliminate_dead_code()  # as torch does
        return graph

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
        degree = operators.degree(step.operator, self.degrees[a], self.degrees[b])
        calls = operators.calls(step.operator, a.meta["val"], b.meta["val"])
        if not calls or degree is None:
            calls, degree = [operators.NEGATION], self.degrees[a]
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
        forward = [value for value in self.values if not self.degrees[value]]
        made: list[tuple[fx.Node | None, Role]] = [
            (forward[at % len(forward)], Role("output", str(i)))
            for i, at in enumerate(self.spec.outputs if forward else ())
        ]
        own = [
            (None if at is None else self._pick(at), Role("gradient", parameter_name(i)))
            for i, at in enumerate(self.spec.gradients)
        ]
        inputs = [
            (self._pick(at), Role("input_gradient", f"x{i}"))
            for i, at in enumerate(self.spec.input_gradients)
        ]
        return written + made + own + inputs

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
    lines += ["", "", f"# outputs: {roles or 'none'}", "torch.manual_seed(0)"]
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
    arguments = [_render_argument(a) for a in node.args]
    arguments += [f"{key}={_render_argument(value)}" for key, value in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join(arguments)})"


def _render_argument(value: Any) -> str:
    if isinstance(value, Sequence):
        return str(list(value))
    return f'float("{value}")' if value in (math.inf, -math.inf) else str(value)
