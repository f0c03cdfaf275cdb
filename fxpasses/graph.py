"""`TrainingGraph`: an ATen FX graph whose inputs and outputs have roles.

It is built from AOTAutograd's joint graph, from the backward graph after partition, from an exported
program or by a test; a pass can't tell these apart. Roles live in node metadata, so
they survive copies:

    placeholder.meta["role"]   Role
    output.meta["roles"]       tuple of Role, one per output in order
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from fxpasses.effects import is_effectful

INPUT_KINDS = ("parameter", "buffer", "input", "saved", "tangent", "state")
# Kinds of state that the program holds, not we: a module's buffer; what waits in a parameter's `.grad`; whether
# anything waits there.
BUFFER_STATE, PENDING_STATE, WAITS_STATE = "buffer", "pending", "waits"
# Kinds of state that belong to the model as a whole: its loss scale; whether a gradient was not finite; the
# norm of its gradients; the limit of that norm.
SCALE_STATE, OVERFLOW_STATE = "loss_scale", "overflow"
NORM_STATE, LIMIT_STATE = "gradient_norm", "norm_limit"
# What faults are armed; what they did; what a collective brought the time before.
FAULT_TABLE, FAULT_NEWS, STALE = "faults", "fault_news", "stale"
# What guards have found in this step; regions that were computed again.
ALARM, REPLAYED = "alarm", "replayed"
DELIVERED = "delivered"  # metadata of a reader that wants a gradient as it arrives, faults included
OUTPUT_KINDS = ("output", "mutation", "saved", "gradient", "input_gradient", "state")


@dataclasses.dataclass(frozen=True)
class Role:
    """What an input or output of a graph is for.

    Attributes:
        kind: one of `INPUT_KINDS` (inputs) or `OUTPUT_KINDS` (outputs).
        name: qualified parameter or buffer name, state name, or a node name where nothing better exists.
    """

    kind: str
    name: str


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """A tensor that lives across steps: what to allocate when it is first needed.

    Attributes:
        kind: what it is, the first part of its name (`"residual"`).
        parameter: qualified name of the parameter (or, for `BUFFER_STATE`, of the buffer) it belongs to.
        shape, dtype, device: of the tensor; they need not be the parameter's.
        fill: initial value of each element.
        parts: where the tensor is one flat tensor of several parameters' states, in this order: their names and
            numbers of elements. `parameter` then is the first of them.
    """

    kind: str
    parameter: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fill: float = 0.0
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.parameter}"

    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient output: of which parameter, by which node, at which output index."""

    parameter: str
    node: fx.Node
    index: int


class TrainingGraph:
    """An ATen graph with roles.

    Args:
        module: the graph; each placeholder and the output node carry their roles.
        decompositions: table that `rewrite.splice` traces new code with; what consumes the graph decides.
    """

    def __init__(
        self, module: fx.GraphModule, decompositions: dict[Any, Callable[..., Any]] | None = None
    ) -> None:
        self.module = module
        self.decompositions = decompositions or {}

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def output_node(self) -> fx.Node:
        return self.graph.output_node()

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The fake mode of the values in `node.meta["val"]`."""
        for node in self.graph.nodes:
            mode = getattr(node.meta.get("val"), "fake_mode", None)
            if mode is not None:
                return mode
        if "fake_mode" in self.module.meta:
            return self.module.meta["fake_mode"]
        raise ValueError("the graph holds no fake tensor: trace it under a FakeTensorMode")

    @property
    def written_buffers(self) -> tuple[StateSpec, ...]:
        """The buffers that the forward of this backward writes (`module.meta["written_buffers"]`)."""
        return self.module.meta.get("written_buffers", ())

    def buffer(self, spec: StateSpec) -> fx.Node:
        """What a written buffer holds when the forward is over: an input; in a whole step, what it writes."""
        for _, node, role in self.outputs("mutation"):
            if role.name == spec.parameter:
                return node
        return self.add_state(spec)

    def write_buffer(self, spec: StateSpec, node: fx.Node) -> None:
        """Make `node` the value that a written buffer has after the graph ran."""
        for index, _, role in self.outputs("mutation"):
            if role.name == spec.parameter:
                self.set_output(index, node)
                return
        self.write_state(spec.name, node)

    @property
    def first_call(self) -> fx.Node:
        """The first node behind the inputs: code inserted before it runs before all else."""
        return next(n for n in self.graph.nodes if n.op != "placeholder")

    def behind(self, node: fx.Node) -> fx.Node:
        """The first place behind `node`, and behind the inputs, where code may stand."""
        following = node.next
        while following.op == "placeholder":
            following = following.next
        return following

    def inputs(self, kind: str | None = None) -> list[tuple[fx.Node, Role]]:
        """Placeholders in order, of one kind if given."""
        nodes = self.graph.find_nodes(op="placeholder")
        return [(n, n.meta["role"]) for n in nodes if kind in (None, n.meta["role"].kind)]

    def outputs(self, kind: str | None = None) -> list[tuple[int, Any, Role]]:
        """(index, node or None, role) of each output in order, of one kind if given."""
        values, roles = self.output_node.args[0], self.output_node.meta["roles"]
        assert isinstance(values, list | tuple) and len(values) == len(roles)
        pairs = enumerate(zip(values, roles, strict=True))
        return [(i, v, r) for i, (v, r) in pairs if kind in (None, r.kind)]

    def gradients(self) -> list[Gradient]:
        """The parameter gradients that this graph computes, in output order."""
        found = self.outputs("gradient")
        return [Gradient(r.name, v, i) for i, v, r in found if isinstance(v, fx.Node)]

    def parameters_by_gradient(self) -> dict[fx.Node, tuple[str, ...]]:
        """Each node that is a gradient once, with the parameters it is of; empty ones left out."""
        found: dict[fx.Node, tuple[str, ...]] = {}
        for gradient in self.gradients():
            if gradient.node.meta["val"].numel() != 0:
                found[gradient.node] = (*found.get(gradient.node, ()), gradient.parameter)
        return found

    def set_output(self, index: int, node: fx.Node) -> None:
        """Make `node` the output at `index`; its role stays."""
        self.set_outputs({index: node})

    def set_outputs(self, nodes: Mapping[int, fx.Node]) -> None:
        """Replace outputs, by index; their roles stay. One call for many: each rebuilds the output."""
        values = list(self.output_node.args[0])  # type: ignore[arg-type]
        for index, node in nodes.items():
            values[index] = node
        self.output_node.args = (tuple(values),)

    def add_output(self, node: fx.Node, role: Role) -> None:
        """Append an output."""
        values, roles = self.output_node.args[0], self.output_node.meta["roles"]
        self.output_node.args = ((*values, node),)  # type: ignore[misc]
        self.output_node.meta["roles"] = (*roles, role)

    def add_input(self, name: str, role: Role, value: torch.Tensor) -> fx.Node:
        """Append a placeholder after the existing ones. `value`: a fake tensor of this graph's mode."""
        placeholders = self.graph.find_nodes(op="placeholder")
        while name in {node.target for node in placeholders}:
            name += "_"
        first = next(iter(self.graph.nodes))
        insertion = (
            self.graph.inserting_after(placeholders[-1])
            if placeholders
            else (self.graph.inserting_before(first))
        )
        with insertion:
            node = self.graph.placeholder(name)
        node.meta.update(role=role, val=value)
        return node

    def add_state(self, spec: StateSpec) -> fx.Node:
        """The input that holds this state before the graph runs; added on first use.

        The graph writes it with `write_state`. At run time it is looked up by the parameter's identity.
        """
        for node, role in self.inputs("state"):
            if role.name == spec.name:
                assert node.meta["state"] == spec, f"state {spec.name} declared twice, differently"
                return node
        with self.fake_mode:
            value = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        node = self.add_input("state_" + identifier(spec.name), Role("state", spec.name), value)
        node.meta["state"] = spec
        return node

    def state_so_far(self, spec: StateSpec) -> fx.Node:
        """What an earlier pass has written to this state, else what came in; added on first use."""
        came_in = self.add_state(spec)
        written = (node for _, node, role in self.outputs("state") if role.name == spec.name)
        return next(written, came_in)

    def write_state(self, name: str, node: fx.Node) -> None:
        """Make `node` the value that state `name` has after the graph ran."""
        for index, _, role in self.outputs("state"):
            if role.name == name:
                self.set_output(index, node)
                return
        self.add_output(node, Role("state", name))

    def eliminate_dead_code(self) -> bool:
        """Drop nodes that nothing uses and that have no effect; returns whether any went."""
        return eliminate_dead_code(self.graph)

    def positions(self) -> dict[fx.Node, int]:
        """Index of each node in the graph's order."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def walk(self) -> Iterator[fx.Node]:
        """The operator calls in order."""
        return (n for n in self.graph.nodes if n.op == "call_function")

    def walk_deep(self) -> Iterator[fx.Node]:
        """The same, with those of subgraphs where these are named."""
        return _walk_deep(self.graph)

    def fingerprint(self) -> str:
        """Digest of nodes, arguments and roles: equal exactly when a pass changed nothing."""
        digest = hashlib.sha256()
        for node in self.graph.nodes:
            row = f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}"
            if node.op in ("placeholder", "output"):
                row += f" {node.meta.get('role')} {node.meta.get('roles')}"
            if "effect" in node.meta:
                row += f" {node.meta['effect']}"
            digest.update(row.encode())
        return digest.hexdigest()

    def recompile(self) -> None:
        self.module.recompile()

    def copy(self) -> TrainingGraph:
        """With nodes of its own, over the same fake values and tensors; without code, see `without_code`."""
        with without_code():
            module = _make_graph_module(self.module, copy.deepcopy(self.graph))
        for name, branch in list(module.named_children()):  # whose dead code is eliminated as well
            module.add_module(name, copy.deepcopy(branch))
        module.meta.update(self.module.meta)
        return TrainingGraph(module, self.decompositions)


def eliminate_dead_code(graph: fx.Graph) -> bool:
    """See `TrainingGraph.eliminate_dead_code`. Subgraphs too, where torch's own drops marked effects."""
    changed = False
    for node in reversed(graph.nodes):
        inner = subgraph_of(node)
        if node.op not in ("placeholder", "output") and not node.users and not is_effectful(node):
            graph.erase_node(node)
            changed = True
        elif inner is not None and eliminate_dead_code(inner.graph):
            inner.recompile()
            changed = True
    return changed


def empty_like(module: fx.GraphModule) -> fx.GraphModule:
    """A graph with no inputs and outputs yet, in the fake mode of another."""
    graph = fx.Graph()
    graph.output(()).meta["roles"] = ()
    empty = fx.GraphModule(torch.nn.Module(), graph)
    empty.meta["fake_mode"] = TrainingGraph(module).fake_mode
    return empty


def without_code() -> contextlib.AbstractContextManager[None]:
    """Graphs that torch makes meanwhile get their Python code when somebody asks for it."""
    return _use_lazy_graph_module(True)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy, with the tensors that it holds, also while the compiler traces with fake ones."""
    with unset_fake_temporarily(), without_warnings_of_pytrees():
        return copy.deepcopy(module)


@contextlib.contextmanager
def without_warnings_of_pytrees() -> Iterator[None]:
    """Without those that torch gives of its own code, when a structure is copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance", FutureWarning)
        yield


def identifier(name: str) -> str:
    """A name as part of one of Python's."""
    return "".join(c if c.isalnum() else "_" for c in name)


def _walk_deep(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        inner = subgraph_of(node)
        if inner is not None:
            yield from _walk_deep(inner.graph)
        elif node.op == "call_function":
            yield node


def subgraph_of(node: fx.Node) -> fx.GraphModule | None:
    """The subgraph that a node names; None for any other node."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    value: Any = owner
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, fx.GraphModule) else None


def read_by(node: fx.Node) -> list[fx.Node]:
    """What a node's value depends on: what it reads; of one of the results of a loop (`meta["reads"]`) those of
    its inputs that this one comes from.
    """
    if node.target is not operator.getitem or "reads" not in node.meta:
        return node.all_input_nodes
    inputs: Any = node.all_input_nodes[0].args[-1]
    return [inputs[i] for i in node.meta["reads"]]


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def tangents_reaching(graph: TrainingGraph) -> dict[fx.Node, frozenset[int]]:
    """For each node the tangents (by position among the tangents) that it depends on."""
    reach: dict[fx.Node, frozenset[int]] = {}
    tangents = {node: i for i, (node, _) in enumerate(graph.inputs("tangent"))}
    empty: frozenset[int] = frozenset()
    for node in graph.graph.nodes:
        own = frozenset({tangents[node]}) if node in tangents else empty
        above = [reach[n] for n in read_by(node) if reach[n]]
        reach[node] = above[0] if len(above) == 1 and not own else own.union(*above)
    return reach
