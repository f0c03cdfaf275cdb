"""What of a region can be computed twice. The rest is put in front of it, and a second run reads the same.

rand_like(x) > p     x gives its form alone ─▶ rand_like(empty) stands in front
dropout(x, p)        ─▶ mask of dropout(ones, p) in front; x * mask / (1 - p) in the region
t(w)                 a view of what comes from outside: in front, since a region can't return it
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from fxpasses.effects import is_random
from fxpasses.fakes import read_instead
from fxpasses.graph import FAULT_TABLE, Role, TrainingGraph
from fxpasses.guards.regions import Region, is_check
from fxpasses.memory import shares_memory
from fxpasses.precision import operator_name
from fxpasses.rewrite import Provenance, model_line, splice

aten = torch.ops.aten
# They read the form of a tensor, not its values.
_FORM_ONLY = {
    *(
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
    ),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
}


def repeatable(graph: TrainingGraph, region: Region, made_by: str) -> list[fx.Node]:
    """The nodes of a region that may run twice, in order. All they read from outside stands in front of the
    last of them.

    Args:
        made_by: name of the pass.

    Raises:
        ValueError: for random numbers that depend on what the region computes.
    """
    inside = set(region.nodes)
    for node in region.nodes:
        if is_check(node) or any(map(is_fault_table, node.all_input_nodes)):
            continue  # of which nobody wants a view; the second round has another one
        reads = [n for n in node.all_input_nodes if n in inside]
        if reads and operator_name(node) in _FORM_ONLY:
            origin = Provenance(made_by, "form", node.name, model_line(node))
            node.replace_input_with(reads[0], unset(graph, node, reads[0], origin))
        elif reads and operator_name(node) == "native_dropout" and is_random(node):
            inside.update(_drop_by_mask(graph, node, made_by))
        elif reads and is_random(node):
            raise ValueError(
                f"option 'guards': region: {region.name!r} can't be computed again: {operator_name(node)} "
                f"draws random numbers ({model_line(node) or node.name}), others the second time; "
                "choose a smaller module, or leave 'region' out"
            )
        elif reads:
            continue
        if shares_memory(node) or _is_part(node) or is_random(node) or _is_constant(node):
            inside.discard(node)
    for node in region.nodes:
        if node not in inside and not node.users:
            graph.graph.erase_node(node)
    return [node for node in graph.walk() if node in inside]


def is_fault_table(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"] == Role("state", f"{FAULT_TABLE}/")


def unset(graph: TrainingGraph, before: fx.Node, like: fx.Node, origin: Provenance) -> fx.Node:
    """Memory of the same form as a value."""
    value = like.meta["val"]
    size, stride = list(value.shape), list(value.stride())
    given = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    with graph.graph.inserting_before(before):
        # The partitioner merges equal calls of `empty_strided`, and what a loop carries may not share memory.
        if value.is_contiguous():
            node = graph.graph.call_function(aten.empty.memory_format, (size,), given)
        else:
            node = graph.graph.call_function(aten.empty_strided.default, (size, stride), given)
    with graph.fake_mode:
        node.meta["val"] = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    node.meta["provenance"] = origin
    return node


def _is_constant(node: fx.Node) -> bool:
    return all(n.op == "get_attr" for n in node.all_input_nodes)


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _drop_by_mask(graph: TrainingGraph, node: fx.Node, made_by: str) -> list[fx.Node]:
    """Let a dropout draw without reading its input; returns the nodes that apply its mask."""
    x, p = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(p, float)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    origin = Provenance(made_by, "dropout", node.name, model_line(node))
    form = unset(graph, node, x, origin)
    ones = splice(graph, node, lambda e: torch.fill(e, 1), form, name="ones", provenance=origin)
    read_instead(graph, [node], x, ones)
    parts: dict[int, fx.Node] = {user.args[1]: user for user in node.users}  # type: ignore[misc]
    if 1 not in parts:
        with graph.graph.inserting_after(node):
            parts[1] = graph.graph.call_function(operator.getitem, (node, 1))
        parts[1].meta.update(val=node.meta["val"][1], provenance=origin)
    if 0 not in parts:
        return []
    following = max(parts.values(), key=graph.positions().__getitem__).next
    first = following.prev

    def apply(x: Tensor, mask: Tensor) -> Tensor:
        return x * mask * scale

    dropped = splice(graph, following, apply, x, parts[1], name="drop", provenance=origin)
    read_instead(graph, list(parts[0].users), parts[0], dropped)
    made = []
    while first.next is not following:
        first = first.next
        made.append(first)
    return made
