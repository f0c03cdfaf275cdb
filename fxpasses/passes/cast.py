"""Run products in low precision, and around them whatever may follow, with as few casts as that takes.

    before   mm(x, w) ─▶ relu ─▶ mm(…, v) ─▶ exp      after   x ─▶ cast ─┐
                                                              w ─▶ cast ─┴▶ mm ─▶ relu ─▶ mm ─▶ cast ─▶ exp
                                                                         v ─▶ cast ─▶ ┘

Before: a joint graph, or a forward without gradients. After: operators that the table allows (`fxpasses.
precision`) read and make the low dtype, others are as they were; inputs and outputs keep their dtypes, so that
parameters stay fp32 masters. Each value is cast at most once, where it is made: a parameter once a step, for
forward and backward together. Only what the program computes in fp32 is ever lowered: its own casts and what it
computes in other dtypes stay, as do regions under `autocast(enabled=False)` and elementwise code behind an
explicit `.float()`. It stands first: passes that follow see the graph that will run. Running it twice changes
nothing more.

Rules of `spec` hold afterwards: a product reads one dtype, no cast feeds only casts, nothing that has an effect
has moved.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.config import PRECISIONS, nearest
from fxpasses.effects import is_collective
from fxpasses.fakes import lie_alike, recompute, refresh
from fxpasses.graph import OUTPUT_KINDS, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.precision import (
    ALLOW,
    CLEAR,
    COMMUTES,
    COMPARES,
    DENY,
    DTYPES,
    INFER,
    KEEPS_FP32,
    PROMOTES,
    UNSET,
    class_of,
    is_batch_norm,
    is_cast,
    operator_name,
    parse_rules,
)
from fxpasses.rewrite import Provenance, model_line, splice, wanted
from fxpasses.sizes import has_one_element


@dataclasses.dataclass(frozen=True)
class Cast(Pass):
    """Options: `dtype` (`bf16`, `fp16`; `fp32` does nothing), `rules` (`"aten.exp=infer;head.*=deny"`)."""

    dtype: str | None = from_environment("precision")
    rules: str | None = from_environment("precision_rules")

    name: ClassVar[str] = "cast"
    stage: ClassVar[str] = "joint"
    preserves_numerics: ClassVar[bool] = False
    inexact: ClassVar[frozenset[str]] = frozenset(OUTPUT_KINDS)

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in PRECISIONS:
            raise ValueError(
                f"option 'passes': cast{{dtype={self.dtype}}}{nearest(self.dtype, PRECISIONS)}"
            )
        parse_rules(self.rules or "")

    def error_bound(self) -> str:
        return (
            "each lowered operator: |out - exact| <= eps(dtype) * (|op| of magnitudes) + fp32 accumulation, "
            "over inputs rounded once to dtype; nothing else changes"
        )

    def tolerance(self, local: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """None from end to end, where a program may amplify what an operator rounds."""
        return torch.tensor(torch.inf)

    def run(self, graph: TrainingGraph) -> Report:
        assert self.dtype is not None
        low = DTYPES[self.dtype]
        if low == torch.float32:
            return Report(changed=False)
        lowered = _wanted(graph, _lowered(graph, low, parse_rules(self.rules or "")))
        if not lowered:
            return Report(changed=False)
        casts = _Casts(graph, low)
        for node in list(graph.graph.nodes):
            if node in lowered:
                casts.lower(node)
            elif not is_cast(node):  # those read either
                casts.raise_inputs(node, lowered)
        casts.settle()
        # Statistics that a lowered operator returns as fp32 go with it.
        low_nodes = sum(_dtype(node) == low for node in lowered)
        return Report(True, {"lowered": low_nodes, "casts": casts.count})


def _lowered(graph: TrainingGraph, low: torch.dtype, rules: Any) -> set[fx.Node]:
    """The nodes that will make the low dtype in place of fp32."""
    kinds = {node: _kind(node, low, rules) for node in graph.walk()}
    lowered: set[fx.Node] = set()
    for node, kind in kinds.items():
        if kind == ALLOW or (kind in (INFER, CLEAR) and _follows(node, lowered, low)):
            lowered.add(node)
    _drop_idle(kinds, lowered, low)
    late = {node for node, kind in kinds.items() if _may_follow_later(node, kind)}
    rounded = _rounded(kinds, lowered, low)
    for node in [n for n in reversed(kinds) if n in late and n not in lowered]:
        if _is_cast_anyway(node, late | lowered, lowered, rounded, low):
            lowered.add(node)
    return lowered


def _drop_idle(kinds: dict[fx.Node, str], lowered: set[fx.Node], low: torch.dtype) -> None:
    """Take out what need not be low, as nothing reads it low; and then what is read low by nothing else."""
    count = None
    while count != len(lowered):
        count = len(lowered)
        for node in reversed(kinds):
            if node in lowered and not _is_tuple(node):
                lowered -= _moved_apart(node, kinds, lowered)
            if kinds[node] == INFER and _only_leads_up(node, lowered):
                # What only leads to fp32 may as well compute in it.
                sources = [n for n in node.all_input_nodes if n in lowered or _dtype(n) == low]
                if len(sources) == 1:
                    lowered -= {node, *_parts(node, lowered)}


def _moved_apart(node: fx.Node, kinds: dict[fx.Node, str], lowered: set[fx.Node]) -> set[fx.Node]:
    """What moves parts of a value to fp32: where there are several, it is the value that is cast."""
    moves = [u for u in node.users if kinds.get(u) == CLEAR and _only_leads_up(u, lowered)]
    parts = [part for user in moves for part in _parts(user, lowered)]
    direct = any(user not in lowered for user in node.users)
    return {*moves, *parts} if len(parts) + direct > 1 else set()


def _rounded(kinds: dict[fx.Node, str], lowered: set[fx.Node], low: torch.dtype) -> set[fx.Node]:
    """The values of which no digits are lost that count if they are rounded: what is low, and what is made of
    that alone, batch norms included. Sums that are carried along in fp32 are not among them.
    """
    found: set[fx.Node] = set()
    for node, kind in kinds.items():
        if node in lowered or _dtype(node) == low:
            found.add(node)
        elif is_batch_norm(node) and "precision" not in (node.meta.get("custom") or {}):
            if found.intersection(node.all_input_nodes):
                found.add(node)
        elif kind in (CLEAR, INFER) and _follows(node, found, low):
            found.add(node)
    return found


def _may_follow_later(node: fx.Node, kind: str) -> bool:
    """Whether a cast may as well stand before it: what moves values, is drawn, or commutes with rounding."""
    commutes = kind == INFER and operator_name(node) in COMMUTES
    return (
        commutes
        or (kind == CLEAR and _is_movement(node))
        or (kind in (INFER, CLEAR) and _is_drawn(node))
    )


def _is_cast_anyway(
    node: fx.Node,
    maybe_low: set[fx.Node],
    lowered: set[fx.Node],
    rounded: set[fx.Node],
    low: torch.dtype,
) -> bool:
    """Whether it is read low, and nothing needs it in fp32: others compare it, or add it to what stays fp32,
    and it is made of what was low before. Else rounding could turn comparisons, or swallow what a sum gains.
    """
    others = [user for user in node.users if user not in lowered]
    may_be_read_low = operator_name(node) in COMMUTES and node in rounded
    if len(others) == len(node.users) or (others and not may_be_read_low):
        return False
    return all(_reads_low_as_well(user, maybe_low, low) for user in others)


def _reads_low_as_well(node: fx.Node, maybe_low: set[fx.Node], low: torch.dtype) -> bool:
    """Whether it makes fp32 of what may be low, or compares that, and the program doesn't say where it runs."""
    read = node.all_input_nodes
    if "precision" in (node.meta.get("custom") or {}):
        return False
    if operator_name(node) in PROMOTES:
        return _promotes(node, [n for n in read if n in maybe_low])
    return len(read) == 1 and _compares_exactly(node, low)


def _wanted(graph: TrainingGraph, lowered: set[fx.Node]) -> set[fx.Node]:
    """Those that shall be lowered; parts go with the whole."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node not in lowered:
            continue
        origin = Provenance("cast", "lower", node.name, model_line(node))
        if node.args[0] in found if operator_name(node) == "getitem" else wanted(origin):
            found.add(node)
    return found


def _only_leads_up(node: fx.Node, lowered: set[fx.Node]) -> bool:
    """Whether nothing low reads what it makes low."""
    parts = _parts(node, lowered)
    return bool(parts) and not any(part.users.keys() & lowered for part in parts)


def _parts(node: fx.Node, lowered: set[fx.Node]) -> list[fx.Node]:
    """What it makes low: itself, or of several values some."""
    return [n for n in (node.users if _is_tuple(node) else (node,)) if n in lowered]


def _kind(node: fx.Node, low: torch.dtype, rules: Any) -> str:
    """The class of a node here: what the program pins, has an effect, or makes no fp32, is left alone; parts go
    with the whole, whatever is said of them.
    """
    if operator_name(node) == "getitem" and _dtype(node) == torch.float32:
        return CLEAR
    custom = node.meta.get("custom") or {}
    kind = class_of(node, rules)
    if custom.get("precision") == "keep" or _has_effect(node) or _dtype(node) != torch.float32:
        return DENY
    if kind == INFER and (custom.get("precision") == "explicit" or not _fits(node, low)):
        return DENY
    return kind


def _has_effect(node: fx.Node) -> bool:
    """Random operators have none here: they give the same values wherever they stand."""
    return is_collective(node) or "effect" in node.meta


def _fits(node: fx.Node, low: torch.dtype) -> bool:
    """Whether the numbers in its arguments are within the range of the low dtype."""
    numbers = [a for a in node.args if isinstance(a, float) and abs(a) != float("inf")]
    return all(abs(number) <= torch.finfo(low).max for number in numbers)


def _follows(node: fx.Node, lowered: set[fx.Node], low: torch.dtype) -> bool:
    """Whether all that it reads in fp32 will be low. Small constants and masks don't count."""
    if operator_name(node) == "getitem":
        return node.args[0] in lowered
    if operator_name(node) in UNSET:  # of what it is like only the shape counts
        return False
    read = [n for n in node.all_input_nodes if _dtype(n) in (torch.float32, low)]
    values = [n for n in read if not _is_constant(n, low) and not _comes_from_mask(n)]
    return bool(values) and all(n in lowered or _dtype(n) == low for n in values)


def _dtype(node: fx.Node) -> torch.dtype | None:
    """Of several values, that of the first that is a tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return next((v.dtype for v in values if isinstance(v, torch.Tensor)), None)


def _is_constant(node: fx.Node, low: torch.dtype) -> bool:
    if operator_name(node) not in ("full", "scalar_tensor") or _dtype(node) != torch.float32:
        return False
    value = _value(node)
    fits = isinstance(value, int | float) and not torch.finfo(low).max < abs(value) < float("inf")
    return fits and has_one_element(node.meta["val"])


def _value(node: fx.Node) -> Any:
    """What `full` or `scalar_tensor` makes a tensor of."""
    return node.args[1] if operator_name(node) == "full" else node.args[0]


def _is_mask(node: fx.Node) -> bool:
    """Truth values as numbers."""
    return is_cast(node) and _dtype(node.all_input_nodes[0]) == torch.bool


def _comes_from_mask(node: fx.Node) -> bool:
    """A mask, drawn or given, or a multiple of one (dropout's): it follows what it is multiplied with."""
    name = operator_name(node)
    if name in ("mul", "div") and len(node.all_input_nodes) == 1:
        return _comes_from_mask(node.all_input_nodes[0])
    return _is_mask(node) or name == "bernoulli"


def _is_drawn(node: fx.Node) -> bool:
    """A mask drawn with one probability, which any dtype draws alike; a multiple of it; where it is drawn."""
    name, read = operator_name(node), node.all_input_nodes
    if name in UNSET:
        return all(operator_name(user) == "bernoulli" for user in node.users)
    if name == "bernoulli":
        return operator_name(read[0]) in UNSET
    return name in ("mul", "div") and len(read) == 1 and _is_drawn(read[0])


def _is_movement(node: fx.Node) -> bool:
    """One value in, the same value out, elsewhere: a cast may stand on either side of it."""
    others = ("getitem", "bernoulli", *UNSET)
    return len(node.all_input_nodes) == 1 and operator_name(node) not in others


class _Casts:
    """Writes casts, each value's once."""

    def __init__(self, graph: TrainingGraph, low: torch.dtype) -> None:
        self._graph, self._low = graph, low
        self._made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._moved: list[
            fx.Node
        ] = []  # what lies otherwise in memory than it did, or than what it casts
        self.count = 0

    def lower(self, node: fx.Node) -> None:
        """Make a node read and make the low dtype."""
        kept = {node.args[i] for i in KEEPS_FP32.get(operator_name(node), ())}
        if operator_name(node) in UNSET:
            node.kwargs = {**node.kwargs, "dtype": self._low}
            kept.update(node.all_input_nodes)
        for source in node.all_input_nodes:
            if _dtype(source) == torch.float32 and source not in kept and not _is_tuple(source):
                node.replace_input_with(source, self._cast(source, self._low))
        if recompute(self._graph, node):
            self._moved.append(node)

    def raise_inputs(self, node: fx.Node, lowered: set[fx.Node]) -> None:
        """Give a node that stays as it was fp32 in place of what has been lowered."""
        sources = [n for n in node.all_input_nodes if n in lowered and not _is_tuple(n)]
        sources = [n for n in sources if _dtype(n) == self._low]
        name = operator_name(node)
        low = self._low
        if name in UNSET and sources:
            node.kwargs = {**node.kwargs, "dtype": _dtype(node)}
            return
        if (name in PROMOTES and _promotes(node, sources)) or (
            _compares_exactly(node, low) and all(_dtype(n) == low for n in node.all_input_nodes)
        ):
            return
        for source in sources:
            node.replace_input_with(source, self._cast(source, torch.float32))

    def settle(self) -> None:
        """Let fake values be true, and erase the numbers and masks of which now only the low ones are read."""
        refresh(self._graph, (user for node in self._moved for user in node.users))
        for source in {source for source, _ in self._made if not source.users}:
            self._graph.graph.erase_node(source)

    def _cast(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        if (source, dtype) not in self._made:
            cast = self._made[source, dtype] = self._make(source, dtype)
            if not lie_alike(source.meta["val"], cast.meta["val"]):
                self._moved.append(cast)
        return self._made[source, dtype]

    def _make(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        constant, mask = _is_constant(source, dtype), _is_mask(source)
        self.count += not (constant or mask)
        return splice(
            self._graph,
            self._graph.behind(source),
            (lambda x: torch.full(x.shape, _value(source), dtype=dtype, device=x.device))
            if constant
            else (lambda x: x.to(dtype)),
            source.all_input_nodes[0] if mask else source,
            name=f"{source.name}_{str(dtype).removeprefix('torch.')}",
            provenance=Provenance("cast", "cast", source.name, model_line(source)),
        )


def _promotes(node: fx.Node, sources: list[fx.Node]) -> bool:
    """Whether what else it reads makes it fp32 anyway. (A tensor of no dimensions does not, beside others.)"""
    others = [n for n in node.all_input_nodes if n not in sources and _dtype(n) == torch.float32]
    most = max((n.meta["val"].dim() for n in sources), default=0)
    return any(n.meta["val"].dim() >= min(most, 1) for n in others)


def _compares_exactly(node: fx.Node, low: torch.dtype) -> bool:
    """Whether it compares, with numbers, if any, that the low dtype has."""
    numbers = [a for a in node.args if isinstance(a, int | float)]
    exact = all(torch.tensor(n, dtype=low).item() == n for n in numbers)
    return exact and operator_name(node) in COMPARES


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)
