"""Run a graph node by node, and find what first made a value that is not finite.

A node *makes* one if it has NaN and none of its inputs does, or infinity and all of its inputs are finite. What
a program writes as a constant (`masked_fill(mask, -inf)`) it means. Only what leads to an output that is not
finite counts: the minus infinities in front of a softmax usually don't.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from fxpasses.dynamo import module_of
from fxpasses.effects import is_collective
from fxpasses.finite import is_inexact
from fxpasses.rewrite import Provenance, model_line, origin_of

NAN, INF = "nan", "inf"


@dataclasses.dataclass(frozen=True)
class Extremes:
    """What a tensor holds.

    Attributes:
        name: of the node, or of the parameter, buffer or input that it is.
        dtype, shape: of the tensor.
        minimum, maximum, largest: the last one of absolute values; NaN if there is one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    largest: float

    def __str__(self) -> str:
        form = f"{self.dtype}{list(self.shape)}"
        return (
            f"{self.name} ({form}) in [{self.minimum:g}, {self.maximum:g}], |x| <= {self.largest:g}"
        )


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """The first node that made a value that is not finite.

    Attributes:
        kind: `"nan"` or `"inf"`.
        operator: `"aten.exp"`; `"input"` for a parameter, buffer or input that was not finite to begin with.
        name: of the node, or of that input.
        phase: `"forward"` or `"backward"`.
        module: qualified name of the module whose code it belongs to, as far as it is known.
        model_line: `file:line` of that code.
        made_by: the pass that wrote the node; empty for the program's own.
        inputs: what it read.
    """

    kind: str
    operator: str
    name: str
    phase: str
    module: str
    model_line: str
    made_by: str
    inputs: tuple[Extremes, ...]

    def __str__(self) -> str:
        module = f" in {self.module}" if self.module else ""
        line = f" ({self.model_line})" if self.model_line else ""
        by = f", written by pass {self.made_by!r}," if self.made_by else ""
        if self.operator == "input":
            return f"{self.phase}: {self.name} holds {self.kind}: {self.inputs[0]}"
        inputs = "".join(f"\n  from {extremes}" for extremes in self.inputs)
        return f"{self.phase}: {self.operator}{by} made {self.kind}{module}{line}{inputs}"


class Probe(fx.Interpreter):
    """Runs a graph once.

    Args:
        module: the graph.
        phase: `"forward"` or `"backward"`.

    Attributes:
        found: the first culprit, once it has run.
    """

    def __init__(self, module: fx.GraphModule, phase: str) -> None:
        super().__init__(module)
        self.found: Nonfinite | None = None
        self._phase = phase
        self._kinds: dict[fx.Node, str] = {}  # of the nodes that are not finite
        self._suspects: dict[fx.Node, Nonfinite] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and look at its value."""
        if is_collective(n):
            raise ValueError(
                f"explain_nonfinite does not communicate, but {n.target} in the model's own code "
                f"({model_line(n)}) does; give it the part of the model in front of or behind that"
            )
        value = super().run_node(n)
        if n.op == "output":
            self._conclude(n)
        elif (kind := kind_of(value)) and not _is_uninitialised(n):
            self._kinds[n] = kind
            if self._is_suspect(n, value):
                self._suspects[n] = self._describe(n, kind, value)
        return value

    def _is_suspect(self, node: fx.Node, value: Any) -> bool:
        kinds = {self._kinds.get(n) for n in node.all_input_nodes}
        if node.op == "placeholder":
            return self._phase == "forward" and (
                self._kinds[node] == NAN
                or node.meta["role"].kind == "parameter"
                or value.max().item() == math.inf  # minus infinity alone is likely a mask
            )
        if node.op != "call_function" or _has_infinite_constant(node):
            return False
        return NAN not in kinds if self._kinds[node] == NAN else kinds <= {None}

    def _conclude(self, output: fx.Node) -> None:
        reached: set[fx.Node] = set()
        pending = [n for n in output.all_input_nodes if n in self._kinds]
        while pending:
            node = pending.pop()
            reached.add(node)
            pending += [n for n in node.all_input_nodes if n in self._kinds and n not in reached]
        self.found = next((s for n, s in self._suspects.items() if n in reached), None)

    def _describe(self, node: fx.Node, kind: str, value: Any) -> Nonfinite:
        is_input = node.op == "placeholder"
        read = {node: value} if is_input else {n: self.env[n] for n in node.all_input_nodes}
        inputs = [_extremes(n, v) for n, v in read.items() if _is_floating(v)]
        provenance = origin_of(node)
        origin = self._origin(node, provenance)
        return Nonfinite(
            kind=kind,
            operator="input" if is_input else _operator(node),
            name=_name(node),
            phase=self._phase,
            module=module_of(origin),
            model_line=model_line(origin),
            made_by=provenance.pass_name,
            inputs=tuple(inputs),
        )

    def _origin(self, node: fx.Node, provenance: Provenance) -> fx.Node:
        """The program's node that one which a pass wrote belongs to."""
        nodes = (n for n in node.graph.nodes if n.name == provenance.source)
        return next(nodes, node)


def kind_of(value: Any) -> str:
    """What is not finite in tensors, nested in any way: `"nan"`, else `"inf"`, else nothing."""
    tensors = [x for x in pytree.tree_leaves(value) if _is_floating(x)]
    if all(x.isfinite().all().item() for x in tensors):
        return ""
    return NAN if any(x.isnan().any().item() for x in tensors) else INF


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_inexact(value)


def _extremes(node: fx.Node, value: torch.Tensor) -> Extremes:
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if not value.numel():
        return Extremes(_name(node), dtype, shape, 0.0, 0.0, 0.0)
    flat = torch.view_as_real(value) if value.is_complex() else value
    low, high = flat.float().aminmax()
    largest = value.abs().max().item()
    return Extremes(_name(node), dtype, shape, low.item(), high.item(), largest)


def _has_infinite_constant(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves)


def _is_uninitialised(node: fx.Node) -> bool:
    return node.op == "call_function" and "empty" in _operator(node)


def _operator(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(f".{node.target._overloadname}")
    return "getitem" if node.target is operator.getitem else str(node.target)


def _name(node: fx.Node) -> str:
    role = node.meta.get("role") if node.op == "placeholder" else None
    return node.name if role is None or role.kind in ("tangent", "state") else role.name
