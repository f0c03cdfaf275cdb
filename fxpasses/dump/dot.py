"""A graph as DOT: a box for each node, coloured by what it does; what the last pass wrote has a bold border."""

from __future__ import annotations

import json
from collections.abc import Collection

from torch import fx

from fxpasses.dump.code import callee, comment_of
from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import TrainingGraph
from fxpasses.precision import is_cast

COLOURS = {"collective": "#f4b183", "cast": "#ffe699", "codec": "#c5b0e6", "pass": "#a9d18e"}
PLAIN = "#dae3f3"


def kind_of(node: fx.Node) -> str:
    """What a node does: `"input"`, `"output"`, `"collective"`, `"codec"`, `"cast"`, `"pass"` (any other
    node that a pass wrote) or `"program"`.
    """
    if node.op in ("placeholder", "output"):
        return {"placeholder": "input"}.get(node.op, "output")
    if is_launch(node) or is_wait(node):
        return "collective"
    if str(node.target).startswith("fxpasses."):
        return "codec"
    if node.op == "call_function" and is_cast(node):
        return "cast"
    return "pass" if "provenance" in node.meta else "program"


class DotLines:
    """Writes graphs as DOT. What is known of a node is not written anew."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, str], tuple[object, str]] = {}

    def of(self, graph: TrainingGraph, new: Collection[str] = ()) -> list[str]:
        """The lines of the file.

        Args:
            new: names of nodes with a bold border.
        """
        lines = ["digraph {", '  node [shape=box, style=filled, fontname="monospace"]']
        lines += (self._node(n, n.name in new) for n in graph.graph.nodes)
        edges = (
            f'  "{used.name}" -> "{n.name}"'
            for n in graph.graph.nodes
            for used in n.all_input_nodes
        )
        return [*lines, *edges, "}"]

    def _node(self, node: fx.Node, is_new: bool) -> str:
        key = (node, node.name)
        known = self._known.get(key)
        if known is None or known[0] is not node.meta.get("provenance"):
            known = (node.meta.get("provenance"), _attributes(node))
            self._known[key] = known
        bold = ", penwidth=3" if is_new else ""
        return f'  "{node.name}" [{known[1]}{bold}]'


def _attributes(node: fx.Node) -> str:
    kind = kind_of(node)
    if node.op == "placeholder":
        role = node.meta["role"]
        label = f"{node.name}\\n{role.kind} {role.name}"
    elif node.op == "output":
        label = "output"
    else:
        label = f"{node.name}\\n{callee(node.target) if callable(node.target) else node.target}"
    colour = COLOURS.get(kind, PLAIN)
    text = json.dumps(label).replace("\\\\n", "\\n")
    return f'label={text}, tooltip={json.dumps(comment_of(node))}, fillcolor="{colour}"'
