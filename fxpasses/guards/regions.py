"""Regions: the operators of one module, as a part of a graph that can be computed again alone.

    x ─▶ ┌ linear ─▶ gelu ─▶ linear ┐ ─▶ …        region `blocks.1.mlp`
         └   └▶ check    └▶ … ─▶ check ┘ ─▶ alarm

To it belong what these operators compute, whatever leads from one of them to another, the faults that strike
them, and the checks of guards. In a backward they are the operators that autograd made of the module's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import operator
from collections.abc import Collection, Iterable

from torch import fx

from fxpasses.effects import is_effectful, may_be_random
from fxpasses.graph import TrainingGraph, subgraph_of
from fxpasses.precision import calls_of, operator_name
from fxpasses.rewrite import model_line, origin_of

# Of what passes wrote about an operator of the region: checks of its result, faults that strike it. What is
# about a gradient on its way (`Provenance.parameters`) happens behind the region.
CHECKS = ("check_products", "check_gradient_products", "check_sums")
_FAULTS = ("inject_forward", "inject")
_MODULES = "checked_modules"


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of a graph that no way leads out of and back into.

    Attributes:
        name: qualified name of the module; of each further call of it with its number.
        nodes: in the graph's order.
    """

    name: str
    nodes: tuple[fx.Node, ...]

    @property
    def is_checked(self) -> bool:
        return any(map(is_check, self.nodes))


def regions_of(graph: TrainingGraph, pattern: str, among: Collection[fx.Node]) -> list[Region]:
    """The regions of the outermost modules whose qualified names match a pattern.

    Args:
        among: nodes whose modules count.

    Raises:
        ValueError: for two regions that are not apart, and for one that holds what can't be repeated:
            collectives, other effects, control flow.
    """
    own: dict[str, set[fx.Node]] = {}
    for node in graph.walk():
        # One of several results goes where the operator goes.
        is_own = "provenance" not in node.meta and node.target is not operator.getitem
        name = _region(node, pattern) if is_own and node in among else None
        if name is not None:
            own.setdefault(name, set()).add(node)
    ordered = list(graph.graph.nodes)
    order = graph.positions()
    attached = _attachable(graph)
    found: list[Region] = []
    taken: dict[fx.Node, str] = {}
    for name, nodes in own.items():
        with_own = nodes.union(*(attached.get(node.name, ()) for node in nodes))
        whole = _convex(with_own, ordered, order)
        for node in whole:
            _refuse(pattern, name, node, taken)
            taken[node] = name
        found.append(Region(name, tuple(sorted(whole, key=order.__getitem__))))
    return found


def is_check(node: fx.Node) -> bool:
    """Whether a guard that a region holds made it."""
    return origin_of(node).pass_name in CHECKS


def note_modules(graph: TrainingGraph) -> None:
    """Let a graph remember the modules of which something is checked."""
    checked = {node.meta["provenance"].source for node in graph.walk() if is_check(node)}
    names = {name for n in graph.walk() if n.name in checked for name, _ in calls_of(n) if name}
    graph.module.meta[_MODULES] = frozenset(names)


def checked_modules(graph: TrainingGraph) -> frozenset[str]:
    """What `note_modules` has found."""
    return graph.module.meta.get(_MODULES, frozenset())


def _region(node: fx.Node, pattern: str) -> str | None:
    for name, number in calls_of(node):
        if name and fnmatch.fnmatchcase(name, pattern):
            return f"{name} (call {number + 1})" if number else name
    return None


def _attachable(graph: TrainingGraph) -> dict[str, list[fx.Node]]:
    """By the name of the node that they are about."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.walk():
        origin = origin_of(node)
        is_fault = origin.pass_name in _FAULTS and not origin.parameters
        if is_check(node) or is_fault:
            found.setdefault(origin.source, []).append(node)
    return found


def _convex(nodes: set[fx.Node], ordered: list[fx.Node], order: dict[fx.Node, int]) -> set[fx.Node]:
    """The nodes with all that stands on a way between two of them, and all results of each."""
    places = [order[node] for node in nodes]
    window = ordered[min(places) : max(places) + 1]
    behind, before = set(nodes), set(nodes)
    for node in window:
        if any(n in behind for n in node.all_input_nodes):
            behind.add(node)
    for node in reversed(window):
        if any(n in before for n in node.users):
            before.add(node)
    whole = behind & before
    return whole | {user for node in whole for user in _results(node)}


def _results(node: fx.Node) -> Iterable[fx.Node]:
    several = isinstance(node.meta.get("val"), list | tuple)
    return [user for user in node.users if several and user.target is operator.getitem]


def _refuse(pattern: str, name: str, node: fx.Node, taken: dict[fx.Node, str]) -> None:
    what = None
    if node in taken:
        what = (
            f"it is not apart from {taken[node]!r}, which reads what it computes and is read by it"
        )
    elif is_effectful(node) and "provenance" not in node.meta and not may_be_random(node):
        what = f"it holds {operator_name(node)}, which does more than compute"
    elif any(subgraph_of(n) is not None for n in node.all_input_nodes):
        what = f"it holds control flow, {operator_name(node)}"
    if what is not None:
        line = f" ({model_line(node)})" if model_line(node) else ""
        raise ValueError(
            f"option 'guards': region={pattern!r}: {name!r} can't be computed again alone: {what}{line}; "
            "choose a smaller module, or leave 'region' out"
        )
