"""What comes in and goes out of a region, and what has to make way for it to become one node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fxpasses.effects import is_effectful
from fxpasses.graph import FAULT_NEWS
from fxpasses.guards.regions import Region, is_check
from fxpasses.memory import shares_memory
from fxpasses.sizes import are_known


@dataclasses.dataclass(frozen=True)
class Boundary:
    """What comes in and goes out of a region.

    Attributes:
        inside: its nodes, without those that stay in front of it.
        inputs: what they read.
        flags: verdicts of checks, bools without dimensions.
        news: of faults.
        results: what is read outside.
        views: nodes inside that give another form to a result and are read outside.
    """

    inside: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    flags: tuple[fx.Node, ...]
    news: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        return (*self.flags, *self.results)


def boundary_of(ordered: Sequence[fx.Node]) -> Boundary:
    """The boundary of what will be in the loop: nodes in the order of the graph."""
    inside = set(ordered)
    inputs = dict.fromkeys(n for node in ordered for n in node.all_input_nodes if n not in inside)
    read = [node for node in ordered if any(user not in inside for user in node.users)]
    views: dict[fx.Node, None] = {}
    results: dict[fx.Node, None] = {}
    pending = read[::-1]
    while pending:
        node = pending.pop()
        if not shares_memory(node):
            results[node] = None
        elif node not in views:
            views[node] = None
            pending += [n for n in node.all_input_nodes if n in inside]
    flags = tuple(n for n in results if is_check(n) and n.meta["val"].dtype == torch.bool)
    news = tuple(n for n in results if FAULT_NEWS in n.meta)
    kept = tuple(n for n in ordered if n in results and n not in flags and n not in news)
    in_order = tuple(node for node in ordered if node in views)
    return Boundary(tuple(ordered), tuple(inputs), flags, news, kept, in_order)


def refuse_unknown_sizes(region: Region) -> None:
    for node in region.nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        sizes = [size for v in values if isinstance(v, Tensor) for size in v.shape]
        if not are_known(sizes):
            raise ValueError(
                f"option 'guards': region: {region.name!r} computes {node.name!r}, whose size is not known at "
                "compile time; compile with dynamic=False, or leave 'region' out"
            )


def standing_between(boundary: Boundary, order: dict[fx.Node, int]) -> list[fx.Node]:
    """What depends on the region and stands in front of its last node."""
    inside, dependent = set(boundary.inside), dict.fromkeys(boundary.inside)
    node, last = boundary.inside[0], boundary.inside[-1]
    while order[node] < order[last]:
        node = node.next
        if node not in inside and any(n in dependent for n in node.all_input_nodes):
            if is_effectful(node) and "provenance" not in node.meta:
                raise ValueError(
                    f"option 'guards': region: {node.name!r} reads what one computes, stands between its "
                    "operators and can't be moved; choose a smaller module, or leave 'region' out"
                )
            dependent[node] = None
    return [node for node in dependent if node not in inside]
