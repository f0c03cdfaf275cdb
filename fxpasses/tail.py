"""Whole steps, the second half: what a function does with reduced gradients, behind the graph that makes them.

See `whole_step.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.effects import is_wait
from fxpasses.graph import WAITS_STATE, Gradient, Role, StateSpec, TrainingGraph
from fxpasses.marking import MARKER
from fxpasses.rewrite import Provenance, splice
from fxpasses.variants import TOTAL, Variant, add_absent
from fxpasses.whole_step import COPY, WRITE, WholeStep


def prepare(step: WholeStep, graph: TrainingGraph, variant: Variant) -> None:
    """Give a copy of the head the inputs and outputs of a variant, before any pass sees it.

    What is pending of a gradient is what the graph finds in `.grad`, if an input says that it waits: it may be
    reduced already, and the function may change it in front of its backward.
    """
    if variant.mode == TOTAL:
        for gradient in graph.gradients():
            if gradient.parameter in step.before and gradient.node.meta["val"].numel():
                _add_pending(graph, gradient, step.before[gradient.parameter])
    add_absent(graph, variant)


def _add_pending(graph: TrainingGraph, gradient: Gradient, index: int) -> None:
    before = graph.outputs()[index][1]
    spec = StateSpec(WAITS_STATE, gradient.parameter, (), torch.bool, before.meta["val"].device)
    positions = graph.positions()
    last = max(gradient.node, before, key=positions.__getitem__)
    total, rest = splice(
        graph,
        graph.behind(last),
        lambda new, old, waits: (
            new + torch.where(waits, old, 0),
            torch.where(waits, 0, old),
        ),
        gradient.node,
        before,
        graph.add_state(spec),
        name=f"total{gradient.index}",
        provenance=Provenance(
            "accumulation", "total", gradient.node.name, parameters=(gradient.parameter,)
        ),
    )
    graph.set_outputs({gradient.index: total, index: rest})


def join(step: WholeStep, graph: TrainingGraph) -> None:
    """Put the tail behind a head that passes have worked on. A copy that only fills a new `.grad` is left out.

    Args:
        graph: a copy of `step.head`. Its outputs become those of the source, followed by any that were added
            to the head.
    """
    outputs = graph.outputs()
    values = [value for _, value, _ in outputs]
    inputs = [node for node, _ in graph.inputs()]
    originals = step.source.graph.find_nodes(op="placeholder")
    env = dict(zip(originals, inputs, strict=False))  # state inputs follow
    env |= {node: values[index] for node, index in step.kept.items()}
    env |= _finished(step, graph, values)
    for node in step.tail:
        if node.target is not MARKER:
            env[node] = _inline(graph, node, env, values, step)
    added = outputs[step.head_outputs :]
    _write_others(graph, [(value, role) for _, value, role in added if role.kind == "mutation"])
    _return(step, graph, env, [(v, r) for _, v, r in added if r.kind != "mutation"])


def _finished(
    step: WholeStep, graph: TrainingGraph, values: Sequence[Any]
) -> dict[fx.Node, fx.Node]:
    """What each parameter's `.grad` holds once its gradient is reduced, by its last marker."""
    found = {mark.nodes[-1]: values[index] for index, mark in enumerate(step.marks)}
    adding = {
        m.nodes[-1]: values[step.before[m.parameter]] for m in step.marks if m.before is not None
    }
    # What nobody reduced may be an input, expanded, of several parameters, or an output besides. Multiplied and
    # not cloned: Inductor removes clones.
    raw = [m for m, value in found.items() if m not in adding and not _is_received(value)]
    sums, owned = splice(
        graph,
        graph.output_node,
        lambda olds, news, others: (
            [old + new for old, new in zip(olds, news, strict=True)],
            [other * 1 for other in others],
        ),
        list(adding.values()),
        [found[marker] for marker in adding],
        [found[marker] for marker in raw],
        name="grad",
        provenance=Provenance("whole_step", "finish"),
    )
    return found | dict(zip(adding, sums, strict=True)) | dict(zip(raw, owned, strict=True))


def _is_received(node: fx.Node) -> bool:
    """Whether this is (a part of) what a collective returned."""
    while not is_wait(node):
        if len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
    return True


def _inline(
    graph: TrainingGraph,
    node: fx.Node,
    env: dict[fx.Node, fx.Node],
    values: list[Any],
    step: WholeStep,
) -> fx.Node:
    copied: Any = node.args[1] if node.target is COPY else None
    if copied is not None and copied.target is MARKER and _same_form(node, env[copied]):
        return env[copied]
    for used in node.all_input_nodes:
        if used.op == "get_attr" and used not in env:
            env[used] = _get_attr(graph, step.source, used)
    with graph.graph.inserting_before(graph.output_node):
        if node in step.written:
            place: Any = node.args[0]
            write = graph.graph.call_function(WRITE, (env[place], values[step.written[node]]))
            write.meta = dict(node.meta)
            return write
        return graph.graph.node_copy(node, env.__getitem__)


def _same_form(node: fx.Node, value: fx.Node) -> bool:
    new, old = node.meta["val"], value.meta["val"]
    forms = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in (new, old)]
    return forms[0] == forms[1]


def _get_attr(graph: TrainingGraph, source: fx.GraphModule, node: fx.Node) -> fx.Node:
    name = str(node.target)
    if not hasattr(graph.module, name):
        setattr(graph.module, name, getattr(source, name))
    with graph.graph.inserting_before(graph.output_node):
        return graph.graph.get_attr(name)


def _write_others(graph: TrainingGraph, mutations: list[tuple[fx.Node, Role]]) -> None:
    """Write inputs that the source only reads (buffers that other ranks write)."""
    places = {role.name: node for node, role in graph.inputs("buffer")}
    for value, role in mutations:
        place = places[role.name]
        if value is not place:
            with graph.graph.inserting_before(graph.output_node):
                written = graph.graph.call_function(WRITE, (place, value))
            written.meta["val"] = place.meta["val"]


def _return(
    step: WholeStep,
    graph: TrainingGraph,
    env: Mapping[fx.Node, fx.Node],
    added: list[tuple[fx.Node, Role]],
) -> None:
    source = step.source.graph.output_node()
    own: Any = fx.map_arg(source.args[0], env.__getitem__)
    roles = (*source.meta["roles"], *(role for _, role in added))
    graph.output_node.args = ((*own, *(value for value, _ in added)),)
    graph.output_node.meta = {**source.meta, "roles": roles}
    graph.eliminate_dead_code()
    graph.recompile()
