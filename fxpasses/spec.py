"""The rules that every graph obeys, checked after every pass.

A rule is a function from a graph to the nodes that break it, with what is wrong. A broken rule is a
`SpecError` that names the pass, the rule and the node.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx

from fxpasses.effects import COLLECTIVE_NAMESPACE, is_effectful, is_launch, is_wait
from fxpasses.graph import INPUT_KINDS, OUTPUT_KINDS, PENDING_STATE, WAITS_STATE, TrainingGraph
from fxpasses.precision import ALLOW, KEEPS_FP32, TABLE, is_cast, operator_name

Violation = tuple[fx.Node, str]
Rule = Callable[[TrainingGraph], Iterator[Violation]]


class SpecError(RuntimeError):
    """A graph breaks a rule."""


def defined_before_use(graph: TrainingGraph) -> Iterator[Violation]:
    """A node stands after all that it reads."""
    seen: set[fx.Node] = set()
    for node in graph.graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                yield node, f"uses {used.name!r} before it is defined"
        seen.add(node)


def inputs_first(graph: TrainingGraph) -> Iterator[Violation]:
    """Inputs stand in front of all that is computed."""
    computed = ""
    for node in graph.graph.nodes:
        if node.op == "placeholder" and computed:
            yield node, f"is an input behind {computed!r}"
        elif node.op == "call_function":
            computed = node.name


def has_value(graph: TrainingGraph) -> Iterator[Violation]:
    """Each input, and each operator call whose result is used, has a fake value; of one of several results it
    is that one's.
    """
    for node in graph.graph.nodes:
        matters = node.op == "placeholder" or (node.op == "call_function" and node.users)
        if matters and "val" not in node.meta:
            yield node, "has no fake value (meta['val'])"
        elif node.target is operator.getitem and node.users:
            whole, index = node.args
            value = whole.meta["val"][index]
            if isinstance(value, torch.Tensor) and value.dtype != node.meta["val"].dtype:
                yield node, f"is said to be {node.meta['val'].dtype}, but is {value.dtype}"


def has_roles(graph: TrainingGraph) -> Iterator[Violation]:
    """Inputs and outputs have roles of a known kind."""
    for node in graph.graph.find_nodes(op="placeholder"):
        role = node.meta.get("role")
        if role is None or role.kind not in INPUT_KINDS:
            yield node, f"is an input with role {role}"
    output = graph.output_node
    roles, values = output.meta.get("roles", ()), output.args[0]
    if len(roles) != len(values):  # type: ignore[arg-type]
        yield output, f"has {len(values)} outputs and {len(roles)} roles"  # type: ignore[arg-type]
    for role in roles:
        if role.kind not in OUTPUT_KINDS:
            yield output, f"has an output with role {role}"


def waited_once(graph: TrainingGraph) -> Iterator[Violation]:
    """What a collective returns is read by exactly one wait, and by nothing else."""
    for node in graph.walk():
        if is_launch(node) and not _returns_list(node):
            waits = [user for user in node.users if is_wait(user)]
            if len(waits) != 1:
                yield node, f"is awaited {len(waits)} times"
            for user in node.users:
                if not is_wait(user):
                    yield user, f"reads {node.name!r}, which is still in flight"


def functional(graph: TrainingGraph) -> Iterator[Violation]:
    """No operator writes its input; state is written by outputs of role `state`."""
    for node in graph.walk():
        target = node.target
        if (
            isinstance(target, torch._ops.OpOverload)
            and target._schema.is_mutable
            and target.namespace != COLLECTIVE_NAMESPACE
            and not _writes_input(graph, node)
        ):
            yield node, f"{target} writes its input"


def state_keeps_its_form(graph: TrainingGraph) -> Iterator[Violation]:
    """A state output has an input of the same name, shape and dtype, and is written once."""
    inputs = {role.name: node for node, role in graph.inputs("state")}
    written: set[str] = set()
    for _, node, role in graph.outputs("state"):
        if role.name not in inputs:
            yield node, f"writes state {role.name!r}, which is not an input"
            continue
        if role.name in written:
            yield node, f"writes state {role.name!r} a second time"
        written.add(role.name)
        old, new = inputs[role.name].meta["val"], node.meta["val"]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            yield (
                node,
                f"writes {new.dtype}{list(new.shape)} to state {role.name!r} of {old.dtype}{list(old.shape)}",
            )


def reduced_once(graph: TrainingGraph) -> Iterator[Violation]:
    """Each gradient output passed exactly one reducing collective, on every way from where it begins to be one:
    a tangent, a pending gradient, or what a backward inside the graph made (`meta["contribution"]`). No way
    leads through what says how gradients are encoded (`meta["encoding"]`).

    Holds once gradients are synchronised.
    """
    counts: dict[fx.Node, set[int]] = {}  # reducing collectives on the ways from there to a node
    for node in graph.graph.nodes:
        begins = _begins_a_gradient(node)
        above = {0} if begins else set().union(*(counts[n] for n in node.all_input_nodes))
        reduces = is_launch(node) and node.meta.get("reduces", False)
        is_encoding = node.meta.get("encoding", False)
        counts[node] = set() if is_encoding else {count + reduces for count in above}
    for gradient in graph.gradients():
        found = counts[gradient.node]
        if gradient.node.meta["val"].numel() and found - {1}:
            times = " or ".join(map(str, sorted(found)))
            yield (
                gradient.node,
                f"is the gradient of {gradient.parameter!r} and was reduced {times} times",
            )


def _begins_a_gradient(node: fx.Node) -> bool:
    if "contribution" in node.meta:
        return True
    role = node.meta.get("role") if node.op == "placeholder" else None
    if role is None or role.kind != "state":
        return role is not None and role.kind == "tangent"
    return node.meta["state"].kind in (PENDING_STATE, WAITS_STATE)


def products_read_one_dtype(graph: TrainingGraph) -> Iterator[Violation]:
    """All that a product reads in floating point has one dtype, but for statistics that it made itself."""
    for node in graph.walk():
        if TABLE.get(operator_name(node)) != ALLOW:
            continue
        keep = KEEPS_FP32.get(operator_name(node), ())
        kept = {node.args[i] for i in keep if i < len(node.args)}
        values = [n.meta.get("val") for n in node.all_input_nodes if n not in kept]
        dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}
        if len(dtypes) > 1:
            yield node, f"reads {' and '.join(sorted(map(str, dtypes)))}"


def casts_are_needed(graph: TrainingGraph) -> Iterator[Violation]:
    """A cast that a pass made is used, and not only to be cast on."""
    for node in graph.walk():
        if is_cast(node) and "provenance" in node.meta and all(map(is_cast, node.users)):
            yield node, "is a cast that feeds " + ("only casts" if node.users else "nothing")


ALWAYS: tuple[Rule, ...] = (
    defined_before_use,
    inputs_first,
    has_roles,
    has_value,
    waited_once,
    functional,
    state_keeps_its_form,
    products_read_one_dtype,
    casts_are_needed,
)


def check(graph: TrainingGraph, after: str, rules: tuple[Rule, ...] = ALWAYS) -> None:
    """Check rules.

    Args:
        after: the name of the pass that ran last, for the message.

    Raises:
        SpecError: for the first rule that does not hold.
    """
    for rule in rules:
        for node, what in rule(graph):
            raise SpecError(
                f"after pass {after!r}: rule {rule.__name__!r}: node {node.name!r} {what}"
            )


def signature(graph: TrainingGraph) -> list[tuple[object, ...]]:
    """Roles, shapes, dtypes and devices of inputs and outputs, without state: what no pass may change."""
    rows: list[tuple[object, ...]] = []
    for node, role in graph.inputs():
        rows.append((role, *_form(node)))
    for _, node, role in graph.outputs():
        rows.append((role, *_form(node)))
    return [row for row in rows if row[0].kind != "state"]  # type: ignore[attr-defined]


def effects(graph: TrainingGraph) -> list[str]:
    """The nodes that have an effect, in order."""
    return [node.name for node in graph.walk_deep() if is_effectful(node)]


def check_effects(
    before: list[str], graph: TrainingGraph, after: str, reorders: bool = False
) -> None:
    """Raise `SpecError` when a pass removed a node with an effect, or moved one past another."""
    for old, new in moved_effects(before, graph, reorders):
        raise SpecError(
            f"after pass {after!r}: rule 'effects': node {old!r} was removed, or moved past {new!r}"
        )


def moved_effects(
    before: list[str], graph: TrainingGraph, reorders: bool = False
) -> Iterator[tuple[str, str]]:
    """Where the nodes with effects don't stand in the order that they had: which one should, and which does.

    Args:
        before: their names, as `effects` has them.
        reorders: the pass may move those that passes have made, but not the program's own.
    """
    known = set(before)
    now = [name for name in effects(graph) if name in known]
    if reorders:
        made = {node.name for node in graph.walk_deep() if "provenance" in node.meta}
        before, now = (
            [*sorted(made & set(names)), *(n for n in names if n not in made)]
            for names in (before, now)
        )
    for old, new in itertools.zip_longest(before, now):
        if old != new:
            yield old, new


def check_signature(before: list[tuple[object, ...]], graph: TrainingGraph, after: str) -> None:
    """Raise `SpecError` when a pass changed an input or output that is not state."""
    now = signature(graph)
    for old, new in zip(before, now, strict=False):
        if old != new:
            raise SpecError(f"after pass {after!r}: rule 'signature': {old} became {new}")
    if len(before) != len(now):
        raise SpecError(
            f"after pass {after!r}: rule 'signature': {len(before)} inputs and outputs became {len(now)}"
        )


def _form(node: object) -> tuple[object, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    return (tuple(value.shape), value.dtype, value.device)


def _returns_list(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _writes_input(graph: TrainingGraph, node: fx.Node) -> bool:
    """AOTAutograd keeps `copy_` onto a buffer that the program mutates: the one mutation it leaves."""
    destination = node.args[0] if node.args else None
    return (
        node.target is torch.ops.aten.copy_.default
        and isinstance(destination, fx.Node)
        and destination.op == "placeholder"
    )
