"""Whole steps: one graph that holds forward, backward and what the function does with `.grad` behind it.

    accumulate(g, before, "p") ─▶ …        head    all that does not wait for a reduced gradient;
                                                   outputs: g, before, and what the tail needs
                                           tail    before + reduced g ─▶ …

`split` cuts the graph at its markers (see `marking.py`). The head is the graph that passes see: its gradients
are outputs, each parameter's in one sum, made where the last backward makes its part. `join` (`tail.py`) puts
the tail behind it again once they have run. A tail is often nothing but the tensors that become `.grad`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxpasses.graph import Role, TrainingGraph
from fxpasses.marking import MARKER
from fxpasses.rewrite import Provenance, model_line, splice

aten = torch.ops.aten
COPY, WRITE = aten.copy.default, aten.copy_.default
# They read the form of their input, not its values.
_FORM_ONLY = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.zero.default,
    aten.fill.Scalar,
)


@dataclasses.dataclass(frozen=True)
class Mark:
    """All that a function adds to one parameter's `.grad`.

    Attributes:
        parameter: its name.
        nodes: the markers; each adds to what the one before it made.
    """

    parameter: str
    nodes: tuple[fx.Node, ...]

    @property
    def gradients(self) -> list[fx.Node]:
        return [node.args[0] for node in self.nodes]  # type: ignore[misc]

    @property
    def before(self) -> fx.Node | None:
        """`.grad` as it was; None where there was none."""
        return self.nodes[0].args[1]  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class WholeStep:
    """A whole step, cut in two.

    Attributes:
        source: the graph as it was; its tail is what `join` puts back.
        tail: nodes of the source, in order.
        head: the graph for passes.
        marks: the head's first outputs are their gradients, in order.
        before: by parameter that has a `.grad` already, the head's output that is its value.
        kept: by node of the source that the tail or the caller needs, the head's output that is its value.
        written: by write of an input in the source, the head's output that is the new value.
    """

    source: fx.GraphModule
    tail: tuple[fx.Node, ...]
    head: fx.GraphModule
    marks: tuple[Mark, ...]
    before: Mapping[str, int]
    kept: Mapping[fx.Node, int]
    written: Mapping[fx.Node, int]

    @property
    def outputs(self) -> int:
        """How many outputs the caller knows of."""
        return len(self.source.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def head_outputs(self) -> int:
        """How many outputs the head was cut with; passes may have added state to it."""
        return len(self.marks) + len(self.before) + len(self.kept) + len(self.written)

    @property
    def works_on_gradients(self) -> str:
        """Where the tail does more than filling `.grad` (`file:line`); else empty."""
        filling = (MARKER, COPY, WRITE, *_FORM_ONLY)
        works = [node for node in self.tail if node.target not in filling]
        return model_line(works[0]) or works[0].name if works else ""


def split(
    module: fx.GraphModule, decompositions: dict[Any, Callable[..., Any]] | None = None
) -> WholeStep:
    """Cut a graph with markers whose inputs and outputs have roles.

    Raises:
        ValueError: for a `.grad` that is changed between two backwards that add to it, or a loss that depends
            on a reduced one.
    """
    marks = _marks(module.graph)
    last = {mark.nodes[-1] for mark in marks}
    _refuse_dependent(module.graph, _with_descendants(module.graph, last))
    writes = module.graph.find_nodes(op="call_function", target=WRITE)
    tail = _with_descendants(module.graph, {*last, *writes})
    head, env = _head(module, tail)
    outputs = _Outputs()
    graph = TrainingGraph(head, decompositions)
    positions = graph.positions()
    for mark in marks:
        outputs.add(_total(graph, mark, env, positions), Role("gradient", mark.parameter))
    with_before = [(m.parameter, m.before) for m in marks if m.before is not None]
    before = {p: outputs.add(env[n], Role("saved", f"grad/{p}")) for p, n in with_before}
    needed = _needed(module.graph, tail, env)
    kept = {node: outputs.add(env[node], role) for node, role in needed.items()}
    written = {
        node: outputs.add(env[node.args[1]], Role("mutation", node.args[0].meta["role"].name))
        for node in writes
        if node.args[1] in env
    }
    outputs.write(head)
    _make_local(graph)
    names = {role.name for _, _, role in graph.outputs("mutation")}
    specs = module.meta.get("written_buffers", ())
    head.meta["written_buffers"] = tuple(spec for spec in specs if spec.parameter in names)
    ordered = tuple(node for node in module.graph.nodes if node in tail)
    return WholeStep(module, ordered, head, marks, before, kept, written)


def _marks(graph: fx.Graph) -> tuple[Mark, ...]:
    chains: dict[fx.Node, tuple[fx.Node, ...]] = {}  # by their last marker
    above = _marked_above(graph)
    for node in graph.find_nodes(op="call_function", target=MARKER):
        _, before, name = node.args
        previous = _copied_from(before)
        if previous in chains and previous.args[2] == name:
            chains[node] = (*chains.pop(previous), node)
        elif before is None:
            chains[node] = (node,)
        elif name in above[before]:
            raise ValueError(_changed(str(name)))
        else:  # cleared or overwritten in place: what was added so far is gone
            chains = {n: c for n, c in chains.items() if n.args[2] != name} | {node: (node,)}
    names = [str(node.args[2]) for node in chains]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(_changed(name))
    return tuple(Mark(n, nodes) for n, nodes in zip(names, chains.values(), strict=True))


def _changed(name: str) -> str:
    return (
        f"the compiled function changes .grad of {name!r} between two backward() calls that add to it; over "
        "several ranks change it in front of the first or behind the last of them, or clear it in place "
        "(zero_grad(set_to_none=False))"
    )


def _marked_above(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """For each node the parameters whose markers its value depends on."""
    above: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        own = frozenset({str(node.args[2])}) if node.target is MARKER else frozenset()
        read = [] if node.target in _FORM_ONLY else node.all_input_nodes
        above[node] = own.union(*(above[n] for n in read))
    return above


def _copied_from(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is COPY:
        node = node.args[1]
    return node


def _with_descendants(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in graph.nodes:
        if node.op != "output" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _refuse_dependent(graph: fx.Graph, behind: set[fx.Node]) -> None:
    for marker in graph.find_nodes(op="call_function", target=MARKER):
        if any(node in behind for node in marker.all_input_nodes):
            raise ValueError(
                f"the gradient of {marker.args[2]!r} depends on a .grad that an earlier backward() of the "
                "compiled function finished, which is reduced by then; compile the two as functions of their "
                "own"
            )


def _head(
    module: fx.GraphModule, tail: set[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A graph of all but the tail, with no outputs yet, and its nodes by those of the source."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output" and node not in tail:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(()).meta["roles"] = ()
    head = fx.GraphModule(module, graph)
    head.meta = dict(module.meta)
    return head, env


class _Outputs:
    """Outputs of a graph, collected."""

    def __init__(self) -> None:
        self._values: list[fx.Node] = []
        self._roles: list[Role] = []

    def add(self, node: fx.Node, role: Role) -> int:
        self._values.append(node)
        self._roles.append(role)
        return len(self._values) - 1

    def write(self, module: fx.GraphModule) -> None:
        output = module.graph.output_node()
        output.args = (tuple(self._values),)
        output.meta["roles"] = tuple(self._roles)
        module.recompile()


def _total(
    graph: TrainingGraph, mark: Mark, env: Mapping[fx.Node, fx.Node], positions: dict[fx.Node, int]
) -> fx.Node:
    """The sum of a parameter's gradients: each is added as soon as it is there."""
    parts = [env[gradient] for gradient in mark.gradients]
    for part in parts:
        part.meta["contribution"] = mark.parameter
    total = parts[0]
    for part in parts[1:]:
        last = max(total, part, key=positions.__getitem__)
        total = _add(graph, graph.behind(last), total, part, mark.parameter)
        positions[total] = positions[last]
    return total


def _make_local(graph: TrainingGraph) -> None:
    """Replace markers that others follow, if anything reads between two backwards: it reads this rank's own."""
    graph.eliminate_dead_code()
    for marker in graph.graph.find_nodes(op="call_function", target=MARKER):
        gradient, before, name = marker.args
        local = gradient if before is None else _add(graph, marker, before, gradient, name)
        marker.replace_all_uses_with(local)
        graph.graph.erase_node(marker)
    graph.recompile()


def _add(graph: TrainingGraph, before: fx.Node, a: fx.Node, b: fx.Node, parameter: str) -> fx.Node:
    return splice(
        graph,
        before,
        torch.add,
        a,
        b,
        name="total",
        provenance=Provenance("whole_step", "add", b.name, model_line(b), (parameter,)),
    )


def _needed(
    graph: fx.Graph, tail: set[fx.Node], env: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, Role]:
    """What the caller and the tail need of the head, apart from its inputs."""
    output = graph.output_node()
    values: Any = output.args[0]
    found = {
        n: role for n, role in zip(values, output.meta["roles"], strict=True) if _computed(n, env)
    }
    for node in graph.nodes:
        if node in tail and node.target not in (MARKER, WRITE):
            new = [n for n in node.all_input_nodes if _computed(n, env)]
            found.update({n: Role("saved", n.name) for n in new if n not in found})
    return found


def _computed(node: Any, env: Mapping[fx.Node, fx.Node]) -> bool:
    return isinstance(node, fx.Node) and node in env and node.op not in ("placeholder", "get_attr")
