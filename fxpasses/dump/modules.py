"""A graph drawn small: nodes of one module, or of one rule of a pass, become one box.

    layers.0.attention   12 nodes ─▶ layers.0.mlp   9 nodes ─▶ bucketing/flatten   0.weight, 0.bias ─▶ …

Drawn by Graphviz (`dot`), which has to be installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator

from torch import fx

from fxpasses.dump.dot import COLOURS, PLAIN, kind_of
from fxpasses.dynamo import module_of
from fxpasses.graph import TrainingGraph

_SECONDS = 60.0  # that a layout may take

Groups = dict[fx.Node, tuple[str, ...]]


def svg(graph: TrainingGraph, limit: int) -> str:
    """The graph as SVG with at most `limit` boxes, where that many can tell its modules and passes apart.

    Raises:
        ValueError: when Graphviz is not installed.
        TimeoutError: when it takes too long.
    """
    dot = graphviz()
    text = "\n".join(collapsed(graph, limit))
    try:
        done = subprocess.run(
            [dot, "-Tsvg"], input=text, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"dot took more than {_SECONDS:g} s to draw {limit} boxes") from error
    return done.stdout


def graphviz() -> str:
    """Path of `dot`.

    Raises:
        ValueError: when it is not installed.
    """
    dot = shutil.which("dot")
    if dot is None:
        raise ValueError(
            "option '--svg': needs Graphviz (dot), which is not installed; --out writes DOT files"
        )
    return dot


def collapsed(graph: TrainingGraph, limit: int) -> list[str]:
    """The graph as DOT, with groups of nodes for boxes."""
    groups = next((g for g in _levels(graph) if len(set(g.values())) <= limit), None)
    if groups is None:
        *_, groups = _levels(graph)
    sizes = Counter(groups.values())
    kinds: dict[tuple[str, ...], str] = {}
    for node, group in groups.items():
        kinds.setdefault(group, kind_of(node))
    numbers = {group: i for i, group in enumerate(sizes)}
    lines = ["digraph {", '  node [shape=box, style=filled, fontname="monospace"]']
    for group, number in numbers.items():
        count = f"\n{sizes[group]} nodes" if sizes[group] > 1 else ""
        label = json.dumps("\n".join(group) + count)
        colour = COLOURS.get(kinds[group], PLAIN)
        lines.append(f'  g{number} [label={label}, fillcolor="{colour}"]')
    edges = Counter(
        (groups[used], group) for node, group in groups.items() for used in node.all_input_nodes
    )
    for (start, end), uses in edges.items():
        if start != end:
            label = f" [label={uses}]" if uses > 1 else ""
            lines.append(f"  g{numbers[start]} -> g{numbers[end]}{label}")
    return [*lines, "}"]


def _levels(graph: TrainingGraph) -> Iterator[Groups]:
    """Groups of nodes, ever coarser: each node by itself; modules, cut at less and less depth; whole passes."""
    nodes = list(graph.graph.nodes)
    yield {node: (node.name,) for node in nodes}
    paths = {node: tuple(filter(None, module_of(node).split("."))) for node in nodes}
    deepest = max(map(len, paths.values()), default=0)
    for depth in range(deepest, -1, -1):
        yield {node: _group(node, paths[node][:depth], True) for node in nodes}
    for depth in (1, 0):
        yield {node: _group(node, paths[node][:depth], False) for node in nodes}


def _group(node: fx.Node, path: tuple[str, ...], detailed: bool) -> tuple[str, ...]:
    """The label of a node's group: its module, or the pass that wrote it."""
    if node.op == "placeholder":
        return ("inputs", node.meta["role"].kind)
    if node.op == "output":
        return ("outputs",)
    origin = node.meta.get("provenance")
    if origin is None:
        side = "backward" if node.meta.get("fwd_nn_module_stack") else ""
        return tuple(filter(None, (".".join(path) or "the model's own code", side)))
    if not detailed:
        return (origin.pass_name,)
    parameters = origin.parameters[:1]
    return (f"{origin.pass_name}/{origin.rule}", *parameters)
