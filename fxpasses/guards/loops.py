"""A region as a loop that runs once, and a second time if one of its checks fails.

    before   x ─▶ region ─▶ y                 after   attempt, again, … ─▶ while again and attempt < 2:
                   └▶ wrong? ─▶ alarm                  x, table ──────────▶     region
                                                                             └▶ y, wrong?, attempt

Both times the same code runs on the same inputs, which the loop holds on to: so a second result has the bits of
a first one without a fault, and no compiler can merge the two. What is carried around the loop is a result
alone; it begins as memory that is not set.

What a region may not do twice, or would do otherwise the second time, stands in front of the loop: random
numbers. What only gives another form to a value from outside stands there too, since a loop can't return it.

`torch.ops.higher_order.while_loop` takes (condition, body, carried, additional); a prototype, checked on torch
2.13: results of a body must be tensors that share no memory with each other or with its inputs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.faults.models import HITS, NEWS
from fxpasses.graph import Role, TrainingGraph
from fxpasses.guards.boundary import (
    Boundary,
    boundary_of,
    refuse_unknown_sizes,
    standing_between,
)
from fxpasses.guards.regions import Region
from fxpasses.guards.repeatable import is_fault_table, repeatable, unset
from fxpasses.rewrite import LOOPED, Provenance, model_line, splice

LOOP = torch.ops.higher_order.while_loop
ATTEMPTS = 2
_OF_THE_BODY = ("fault", "effect", "provenance", "recompute")


def write_loop(
    graph: TrainingGraph, region: Region, made_by: str, stuck: Sequence[bool]
) -> fx.Node:
    """Put a region, which is checked, into a loop; returns whether it ran twice, a bool without dimensions.

    Args:
        made_by: name of the pass.
        stuck: by number of the fault, whether it is there the second time too.

    Raises:
        ValueError: for a region with random numbers that depend on what it computes, or with sizes that are not
            known at compile time.
    """
    refuse_unknown_sizes(region)
    boundary = boundary_of(repeatable(graph, region, made_by))
    assert boundary.flags, "each check has a verdict"
    origin = Provenance(made_by, LOOPED, region.name)
    following = graph.behind(boundary.inside[-1])
    moved = standing_between(boundary, graph.positions())
    if not set(moved).isdisjoint(boundary.inputs):
        raise ValueError(
            f"option 'guards': region: {region.name!r} reads what another region makes of its results, and "
            "can't be computed again alone; choose a smaller module, or leave 'region' out"
        )
    start = _start(graph, following, boundary, origin)
    names = _modules(graph, region, boundary, start, origin, stuck)
    loop, items = _call(graph, following, boundary, start, names, origin)
    _read_outside(graph, following, boundary, items, origin)
    for node in moved:
        following.prepend(node)
    for node in reversed(boundary.inside):
        graph.graph.erase_node(node)
    attempts = _item(graph, loop, 0, following, "attempts", origin)
    again: fx.Node = splice(
        graph, following, lambda n: n > 1, attempts, name="replayed", provenance=origin
    )
    return again


def _start(
    graph: TrainingGraph, before: fx.Node, boundary: Boundary, origin: Provenance
) -> list[fx.Node]:
    """What is carried into the first run."""
    device = boundary.flags[0].meta["val"].device
    count = len(boundary.news)

    def first() -> list[Tensor]:
        attempt = torch.zeros((), dtype=torch.int64, device=device)
        again = torch.ones((), dtype=torch.bool, device=device)
        nothing = torch.zeros(NEWS, dtype=torch.int64, device=device)
        return [attempt, again, *[nothing.clone() for _ in range(count)]]

    start = list(splice(graph, before, first, name="first", provenance=origin))
    return start + [unset(graph, before, node, origin) for node in boundary.returned]


def _modules(
    graph: TrainingGraph,
    region: Region,
    boundary: Boundary,
    start: Sequence[fx.Node],
    origin: Provenance,
    stuck: Sequence[bool],
) -> tuple[str, str]:
    """Add condition and body to the graph's module; returns the names of the two."""
    number = sum(name.startswith("region_") for name, _ in graph.module.named_children()) // 2
    names = (f"region_{number}_again", f"region_{number}")
    condition, carried, _ = _subgraph(graph, start, boundary)
    _finish(
        condition,
        lambda attempt, again: [again & (attempt < ATTEMPTS)],
        carried[:2],
        origin,
    )
    body, carried, env = _subgraph(graph, start, boundary)
    _copy(body, boundary, env, carried[0], origin, stuck)
    flags, news = ([env[n] for n in nodes] for nodes in (boundary.flags, boundary.news))
    known = carried[2 : 2 + len(news)]

    def advance(
        attempt: Tensor, flags: list[Tensor], known: list[Tensor], news: list[Tensor]
    ) -> list[Tensor]:
        pairs = zip(known, news, strict=True)
        heard = [torch.where(old[HITS] > 0, old, new) for old, new in pairs]
        return [attempt + 1, torch.stack(flags).any(), *heard]

    results = [env[node] for node in boundary.returned]
    _finish(body, advance, [carried[0], flags, known, news], origin, results)
    body.eliminate_dead_code()
    for name, sub in zip(names, (condition, body), strict=True):
        graph.module.add_module(name, sub.module)
    return names


def _subgraph(
    graph: TrainingGraph, start: Sequence[fx.Node], boundary: Boundary
) -> tuple[TrainingGraph, list[fx.Node], dict[fx.Node, fx.Node]]:
    """A graph with the loop's inputs; those that are carried, and by node outside those that are not."""
    sub = fx.Graph()
    placeholders = []
    for node in (*start, *boundary.inputs):
        placeholder = sub.placeholder(node.name)
        placeholder.meta.update(val=node.meta["val"], role=Role("input", node.name))
        placeholders.append(placeholder)
    sub.output(()).meta["roles"] = ()
    module = fx.GraphModule(torch.nn.Module(), sub)
    carried, others = placeholders[: len(start)], placeholders[len(start) :]
    env = dict(zip(boundary.inputs, others, strict=True))
    return TrainingGraph(module, graph.decompositions), carried, env


def _copy(
    body: TrainingGraph,
    boundary: Boundary,
    env: dict[fx.Node, fx.Node],
    attempt: fx.Node,
    origin: Provenance,
    stuck: Sequence[bool],
) -> None:
    """Put the region's nodes into the body. The second time there are only such faults as stay."""
    for node in boundary.inputs:
        if is_fault_table(node):
            env[node] = _armed(body, env[node], attempt, origin, stuck)
    for node in boundary.inside:
        with body.graph.inserting_before(body.output_node):
            env[node] = body.graph.node_copy(node, env.__getitem__)


def _armed(
    body: TrainingGraph,
    table: fx.Node,
    attempt: fx.Node,
    origin: Provenance,
    stuck: Sequence[bool],
) -> fx.Node:
    def rows(attempt: Tensor, table: Tensor) -> Tensor:
        first = attempt == 0
        return torch.stack(
            [
                row if stays else torch.where(first, row, 0)
                for row, stays in zip(table, stuck, strict=True)
            ]
        )

    armed: fx.Node = splice(
        body, body.output_node, rows, attempt, table, name="armed", provenance=origin
    )
    return armed


def _finish(
    sub: TrainingGraph,
    fn: Callable[..., Any],
    args: Sequence[Any],
    origin: Provenance,
    results: Sequence[fx.Node] = (),
) -> None:
    """Let a subgraph return what tensor code makes, then results. A condition returns one value."""
    made = splice(sub, sub.output_node, fn, *args, name="loop", provenance=origin)
    returned = (*made, *results)
    sub.output_node.args = (returned if results else returned[0],)
    sub.output_node.meta["roles"] = tuple(Role("output", n.name) for n in returned)
    sub.recompile()


def _call(
    graph: TrainingGraph,
    before: fx.Node,
    boundary: Boundary,
    start: Sequence[fx.Node],
    names: tuple[str, str],
    origin: Provenance,
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """The loop, and by node of the region what stands for its value outside."""
    with graph.graph.inserting_before(before):
        modules = [graph.graph.get_attr(name) for name in names]
        loop = graph.graph.call_function(LOOP, (*modules, tuple(start), tuple(boundary.inputs)))
    with graph.fake_mode:
        results = tuple(torch.empty_like(node.meta["val"]) for node in start)
    loop.meta.update(val=results, provenance=origin)
    needs = _needs(boundary)
    returned = (*boundary.news, *boundary.returned)
    items = {}
    for at, node in enumerate(returned, start=2):
        item = _item(graph, loop, at, before, node.name, _instead_of(node, origin))
        kept = {k: v for k, v in node.meta.items() if k not in _OF_THE_BODY}
        item.meta = {**kept, **item.meta, "reads": needs[node]}
        items[node] = item
    return loop, items


def _item(
    graph: TrainingGraph, loop: fx.Node, at: int, before: fx.Node, name: str, origin: Provenance
) -> fx.Node:
    with graph.graph.inserting_before(before):
        item = graph.graph.create_node("call_function", operator.getitem, (loop, at), name=name)
    item.meta.update(val=loop.meta["val"][at], provenance=origin)
    return item


def _instead_of(node: fx.Node, origin: Provenance) -> Provenance:
    source = node.meta["fault"].name if "fault" in node.meta else node.name
    return dataclasses.replace(origin, source=source, model_line=model_line(node))


def _needs(boundary: Boundary) -> dict[fx.Node, tuple[int, ...]]:
    """For each node inside the inputs, by position, that its value depends on."""
    found: dict[fx.Node, frozenset[int]] = {
        node: frozenset({i}) for i, node in enumerate(boundary.inputs)
    }
    for node in boundary.inside:
        found[node] = frozenset().union(*(found[n] for n in node.all_input_nodes))
    return {node: tuple(sorted(found[node])) for node in boundary.inside}


def _read_outside(
    graph: TrainingGraph,
    before: fx.Node,
    boundary: Boundary,
    items: dict[fx.Node, fx.Node],
    origin: Provenance,
) -> None:
    """Let what stands outside read the loop's results, through views of them made anew."""
    inside = set(boundary.inside)
    env = dict(items)
    for node in boundary.views:
        with graph.graph.inserting_before(before):
            env[node] = graph.graph.node_copy(node, lambda n: env.get(n, n))
        env[node].meta["provenance"] = _instead_of(node, origin)
    for node, stands in env.items():
        node.replace_all_uses_with(stands, delete_user_cb=lambda user: user not in inside)
