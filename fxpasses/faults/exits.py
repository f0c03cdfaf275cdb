"""The safe exits of a graph: guards as comparisons, found by what passes noted on their nodes.

products    checked: a product's result; operands: its factors, and what is added to them
sums        the same of a sum that is a gradient
gradients   checked: a gradient as it is delivered; operand: the sum of its bits when it was made
payloads    dense: checked is the reduced bucket, operand what went in; compressed: checked is what arrived,
            operand the payload without its checksum

Their verdicts lead to the alarm that the host reads before a step, which raises, skips or recomputes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import networkx as nx
from torch import fx

from fxpasses.effects import is_launch, is_wait
from fxpasses.faults.flow import Flow
from fxpasses.faults.ways import Check
from fxpasses.graph import ALARM, Role
from fxpasses.precision import operator_name
from fxpasses.rewrite import LOOPED, origin_of

_PRODUCTS = ("check_products", "check_gradient_products")
_SUMS, _GRADIENTS, _PAYLOADS = "check_sums", "check_gradients", "check_payloads"
CHECKS = (*_PRODUCTS, _SUMS, _GRADIENTS, _PAYLOADS)
# They read the node of a gradient, not what a fault of phase `gradient` makes of it.
_OF_NODES = (*_PRODUCTS, _SUMS, "check_values")


@dataclasses.dataclass(frozen=True)
class Local:
    """A gradient as faults of phase `gradient` hit it: what other readers of its node see stays right."""

    node: fx.Node


def checks_of(flow: Flow) -> tuple[list[Check], list[str]]:
    """The guards that count, and the names of those whose verdict leads to no alarm."""
    order = {node: i for i, node in enumerate(flow.blocks)}
    own = [n for n in flow.blocks if made_by(n, CHECKS) and origin_of(n).rule == "checksum"]
    whole = nx.weakly_connected_components(flow.graph.subgraph(own))
    parts = [sorted(part, key=order.__getitem__) for part in whole]
    parts.sort(key=lambda part: order[part[0]])
    alarms = [v for v in flow.graph if isinstance(v, Role) and v == Role("state", f"{ALARM}/")]
    heard = set().union(*(nx.ancestors(flow.graph, alarm) for alarm in alarms))
    found, lost = [], []
    for part in parts:
        if any(operator_name(node) == "seal" for node in part):
            continue  # writes a checksum, and compares none
        check = _check(flow, part)
        if check is not None and heard.intersection(part):
            found.append(check)
        else:
            lost.append(_check_name(part))
    return found, lost


def _check(flow: Flow, part: Sequence[fx.Node]) -> Check | None:
    reads = _reads(flow, part)
    name, origin = _check_name(part), origin_of(part[0])
    if origin.pass_name == _PAYLOADS:
        arrived = next((r for r in map(_node, reads) if _arrives(r)), None)
        if arrived is None:
            return None
        payload = unstruck(_launch_of(arrived).all_input_nodes[0])
        sealed = made_by(payload, (_PAYLOADS,))
        given = _reads(flow, [payload]) if sealed else [r for r in reads if _node(r) is payload]
        return Check(name, arrived, tuple(given)) if given else None
    result = next((r for r in reads if _program_name(_node(r)) == origin.source), None)
    if origin.pass_name == _GRADIENTS:
        reads = [r for r in reads if origin_of(_node(r)).rule == "bits"]
    operands = tuple(r for r in reads if r is not result)
    return None if result is None else Check(name, result, operands)


def _check_name(part: Sequence[fx.Node]) -> str:
    origin = origin_of(part[0])
    return f"{origin.pass_name}: {origin.source or part[0].name}"


def _reads(flow: Flow, part: Sequence[fx.Node]) -> list[fx.Node | Local]:
    """What a check reads, each once."""
    own = set(part)
    before = itertools.chain.from_iterable(flow.graph.pred[node] for node in part)
    return [n for n in dict.fromkeys(before) if n not in own]


def _arrives(node: fx.Node) -> bool:
    """Whether a node is what a collective brought, or a fault's in its place."""
    return is_wait(node) or ("fault" in node.meta and origin_of(node).rule == "stale")


def _node(vertex: fx.Node | Local) -> fx.Node:
    return vertex.node if isinstance(vertex, Local) else vertex


def _launch_of(arrived: fx.Node) -> fx.Node:
    """The launch of what a wait, or a fault behind it, brings."""
    node = arrived
    while not is_launch(node):
        node = next(n for n in node.all_input_nodes if is_wait(n) or is_launch(n))
    return node


def unstruck(node: fx.Node) -> fx.Node:
    """The value that faults of option `faults` were put on."""
    if "fault" not in node.meta:
        return node
    name = node.meta["fault"].name
    return next((n for n in node.graph.nodes if n.name == name), node)


def _program_name(node: fx.Node) -> str:
    """Of the program's node that one stands for."""
    origin = origin_of(node)
    return origin.source if origin.rule == LOOPED else unstruck(node).name


def reads_node(reader: fx.Node) -> bool:
    """Whether a guard reads the node of a gradient, not what becomes of it on its way."""
    return made_by(reader, _OF_NODES) or origin_of(reader).rule == "bits"


def made_by(node: Any, names: Iterable[str]) -> bool:
    return isinstance(node, fx.Node) and origin_of(node).pass_name in names
