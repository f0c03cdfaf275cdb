"""Where the values of a graph go, as a networkx graph: through control flow, and through the program outside.

    cond(p, true_graph, false_graph, (a, b))      p ─▶ cond ─▶ getitem
                                                  a, b ─▶ inputs of a branch ─▶ … ─▶ its results ─▶ getitem
    while_loop(cond_graph, body_graph, (a,), (b,))
                                                  the same; results of the body ─▶ inputs of both; a ─▶ getitem
    outputs of a joint graph                      output ─▶ OUTSIDE (a loss, say) ─▶ tangents

An edge means that a wrong value at its start may make the one at its end wrong. `map` is as these are; of
any other operator with subgraphs each input may come to each of its results.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch.utils._pytree as pytree
from torch import fx

from fxpasses.graph import TrainingGraph, subgraph_of
from fxpasses.precision import operator_name
from fxpasses.sizes import SYMBOLIC

ENTRY = "graph"  # the block that a call of the graph begins in
OUTSIDE = "the program outside of the graph"
# At which arguments stand the inputs of subgraphs.
_OPERANDS = {"cond": (3,), "while_loop": (2, 3), "map_impl": (1, 2)}
_COPIES = ("clone", "detach", "alias", "lift_fresh_copy")


@dataclasses.dataclass
class Flow:
    """The flow of one graph.

    Attributes:
        graph: vertices are nodes, also those of subgraphs; roles of outputs; and `OUTSIDE`.
        blocks: the block that each node belongs to: `ENTRY`, or the path of a subgraph's attribute.
        unreachable: blocks that no call comes to; nothing of them is in the graph.
    """

    graph: nx.DiGraph = dataclasses.field(default_factory=nx.DiGraph)
    blocks: dict[fx.Node, str] = dataclasses.field(default_factory=dict)
    unreachable: list[str] = dataclasses.field(default_factory=list)

    @property
    def reachable(self) -> list[str]:
        return list(dict.fromkeys(self.blocks.values()))


def flow_of(graph: TrainingGraph) -> Flow:
    """The flow of a graph; nodes stand in its order."""
    flow = Flow()
    _add(flow, graph.module, ENTRY)
    tangents = [node for node, _ in graph.inputs("tangent")]
    for _, value, role in graph.outputs():
        if isinstance(value, fx.Node):
            flow.graph.add_edge(value, role)
            if role.kind == "output" and tangents:
                flow.graph.add_edge(role, OUTSIDE)
                flow.graph.add_edges_from((OUTSIDE, tangent) for tangent in tangents)
    return flow


def _add(flow: Flow, module: fx.GraphModule, block: str) -> None:
    for node in module.graph.nodes:
        if node.op == "output" or subgraph_of(node) is not None:
            continue
        flow.graph.add_node(node)
        flow.blocks[node] = block
        if any(subgraph_of(n) is not None for n in node.all_input_nodes):
            _call(flow, node, block)
        else:
            inputs = (n for n in node.all_input_nodes if not _decides_nothing(flow, n))
            flow.graph.add_edges_from((n, node) for n in inputs)
    for node in module.graph.find_nodes(op="get_attr"):
        if subgraph_of(node) is not None and not node.users:
            _leave_out(flow, node, block)


def _call(flow: Flow, node: fx.Node, block: str) -> None:
    """Add an operator with subgraphs."""
    attributes = [n for n in node.all_input_nodes if subgraph_of(n) is not None]
    kind = operator_name(node)
    inputs = _operands(node, kind)
    dead = _never_run(attributes, node, kind)
    if kind == "cond" and _is_node(node.args[0]):
        flow.graph.add_edge(node.args[0], node)
    if kind not in _OPERANDS:
        flow.graph.add_edges_from((n, node) for n in inputs if _is_node(n))
    carried = pytree.tree_leaves(node.args[2]) if kind == "while_loop" else []
    _bring(flow, node, carried)
    for attribute in attributes:
        if attribute in dead:
            _leave_out(flow, attribute, block)
            continue
        module = subgraph_of(attribute)
        assert module is not None
        placeholders = module.graph.find_nodes(op="placeholder")
        if not placeholders or placeholders[0] not in flow.blocks:
            _add(flow, module, _inner(block, attribute))
        _pass_on(flow, inputs, placeholders)
        if kind == "while_loop" and attribute is attributes[0]:
            flow.graph.add_edges_from((n, node) for n in _results(attribute) if _is_node(n))
            continue
        _bring(flow, node, _results(attribute))
        if kind == "while_loop":
            for again in attributes:
                first = subgraph_of(again).graph.find_nodes(op="placeholder")  # type: ignore[union-attr]
                _pass_on(flow, _results(attribute), first[: len(carried)])


def _operands(node: fx.Node, kind: str) -> list[Any]:
    at = _OPERANDS.get(kind)
    given: Any = (node.args, node.kwargs) if at is None else [node.args[i] for i in at]
    leaves = pytree.tree_leaves(given)
    return [x for x in leaves if not (isinstance(x, fx.Node) and subgraph_of(x) is not None)]


def _pass_on(flow: Flow, values: Sequence[Any], placeholders: Sequence[fx.Node]) -> None:
    """Values come in as placeholders, by position; where numbers differ, any as each."""
    for i, placeholder in enumerate(placeholders):
        given = [values[i]] if len(values) == len(placeholders) else values
        flow.graph.add_edges_from((value, placeholder) for value in given if _is_node(value))


def _bring(flow: Flow, node: fx.Node, results: Sequence[Any]) -> None:
    """Results come out at the `getitem` of their number; all of them where that is not how they are read."""
    known = operator_name(node) in _OPERANDS
    items = [user for user in node.users if known and user.target is operator.getitem]
    if len(items) < len(node.users):
        flow.graph.add_edges_from((n, node) for n in results if _is_node(n))
    for item in items:
        at = item.args[1]
        if isinstance(at, int) and at < len(results) and _is_node(results[at]):
            flow.graph.add_edge(results[at], item)


def _never_run(attributes: list[fx.Node], node: fx.Node, kind: str) -> list[fx.Node]:
    """Subgraphs that a constant condition leaves out."""
    if kind == "cond":
        taken = _constant(node.args[0])
        return [] if taken is None else [attributes[1 if taken else 0]]
    if kind == "while_loop" and _constant(_results(attributes[0])[0]) is False:
        return attributes[1:]
    return []


def _decides_nothing(flow: Flow, node: fx.Node) -> bool:
    """Whether a node is an operator with subgraphs of which values come from these alone."""
    has_subgraphs = any(subgraph_of(n) is not None for n in node.all_input_nodes)
    return has_subgraphs and not flow.graph.in_degree(node)


def _leave_out(flow: Flow, attribute: fx.Node, block: str) -> None:
    module, name = subgraph_of(attribute), _inner(block, attribute)
    assert module is not None
    for path, inner in module.named_modules():
        if isinstance(inner, fx.GraphModule):
            flow.unreachable.append(f"{name}.{path}" if path else name)


def _constant(value: Any) -> bool | None:
    """What a condition always is; None if that depends on values."""
    if isinstance(value, bool | int):
        return bool(value)
    if not isinstance(value, fx.Node):
        return None
    name = operator_name(value)
    if name in ("full", "scalar_tensor"):
        return _constant(value.args[1 if name == "full" else 0])
    if name in _COPIES:
        return _constant(value.args[0])
    if name == "logical_not":
        inner = _constant(value.args[0])
        return None if inner is None else not inner
    return None


def _results(attribute: fx.Node) -> list[Any]:
    module = subgraph_of(attribute)
    assert module is not None
    return pytree.tree_leaves(module.graph.output_node().args[0])


def _inner(block: str, attribute: fx.Node) -> str:
    return str(attribute.target) if block == ENTRY else f"{block}.{attribute.target}"


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def carries_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, or several: not a size."""
    value = node.meta.get("val")
    return not isinstance(value, (int, float, *SYMBOLIC))
