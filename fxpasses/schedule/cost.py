"""How long nodes take: formulas in sizes, the number of ranks, and the rates of the machine.

    compute    max(operations / flops, bytes / memory)      for a product, or for what a compiler fuses
    codec      elements * seconds an element
    link       ring all-reduce     2 (W-1)/W * bytes / bandwidth + 2 (W-1) * latency
               all-gather            (W-1)   * bytes / bandwidth +   (W-1) * latency
               all-to-all, reduce-scatter (W-1)/W * bytes / bandwidth + (W-1) * latency
               broadcast             log2 W  * (bytes / bandwidth + latency)

A formula is evaluated with numbers, or with symbols for the same rates: then it is the closed form. Nothing is
measured, so that every rank finds the same.

Roofline: Williams et al., CACM 2009. Rings: Patarasu and Yuan, JPDC 2009. Latency and bandwidth: Hockney, 1994.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxpasses.schedule.machine import Machine
from fxpasses.sizes import depends_on_data

PENDING = "accumulation"  # what adds pending gradients, as their provenance says
UNKNOWN = 8192  # elements, as Inductor has it
WORLD = sympy.Symbol("W", positive=True, integer=True)


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True)


SYMBOLS = Machine(
    **{f.name: _symbol(f.name) for f in dataclasses.fields(Machine) if f.type == "Any"},
    encode_s={scheme: _symbol(f"encode_{scheme}") for scheme in Machine().encode_s},
    decode_s={scheme: _symbol(f"decode_{scheme}") for scheme in Machine().decode_s},
)
"""A machine whose rates are symbols."""

Amount: TypeAlias = Any  # a whole number, or a sympy expression in symbolic sizes
Coded: TypeAlias = tuple[tuple[str, Amount], ...]  # (scheme, elements)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a node, or several that are fused, do. Amounts may be expressions in the graph's symbolic sizes.

    Attributes:
        flops, flops_16: floating-point operations, by the width of what is multiplied.
        bytes: read and written.
        operators: kernels.
        encoded, decoded: elements by scheme of compression; decoded ones for each payload.
        launches: collectives that the host launches.
        sent: a collective that keeps the host from computing while it is on its way.
    """

    flops: Amount = 0
    flops_16: Amount = 0
    bytes: Amount = 0
    operators: int = 0
    encoded: Coded = ()
    decoded: Coded = ()
    launches: int = 0
    sent: Transfer | None = None

    def formula(self, machine: Machine, world: Any) -> Any:
        """Seconds: a number, or an expression where the machine's rates or an amount are symbols."""
        products = self.flops / machine.flops + self.flops_16 / machine.flops_16
        total = (
            _largest(products, self.bytes / machine.memory) + self.operators * machine.operator_s
        )
        for coded, seconds in ((self.encoded, machine.encode_s), (self.decoded, machine.decode_s)):
            for scheme, elements in coded:
                total = total + elements * seconds[scheme]
        if self.launches:
            total = total + self.launches * machine.collective_s
        if self.sent is not None:
            total = total + self.sent.volume(world) * machine.host_s
        return total


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective on the wire.

    Attributes:
        kind: name of the functional collective.
        bytes: of the payload on each rank.
    """

    kind: str
    bytes: Amount

    def volume(self, world: Any) -> Any:
        """Bytes that a rank sends."""
        return self._shares(world)[0] * self.bytes

    def formula(self, machine: Machine, world: Any) -> Any:
        """Seconds, as for `Cost`."""
        share, messages = self._shares(world)
        return share * self.bytes / machine.bandwidth + messages * machine.latency

    def _shares(self, world: Any) -> tuple[Any, Any]:
        """Multiples of the payload that a rank sends, and messages one after the other."""
        for prefix, of in _COLLECTIVES.items():
            if self.kind.startswith(prefix):
                return of(world)
        return _COLLECTIVES["all_gather"](world)


def _steps(world: Any) -> Any:
    return sympy.log(world, 2) if isinstance(world, sympy.Expr) else math.log2(world)


_COLLECTIVES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "all_reduce": lambda w: (2 * (w - 1) / w, 2 * (w - 1)),
    "all_to_all": lambda w: ((w - 1) / w, w - 1),
    "reduce_scatter": lambda w: ((w - 1) / w, w - 1),
    "broadcast": lambda w: (_steps(w), _steps(w)),
    "all_gather": lambda w: (w - 1, w - 1),
}


def _largest(a: Any, b: Any) -> Any:
    if isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr):
        return sympy.Max(a, b)
    return max(a, b)


def seconds(
    cost: Cost | Transfer, machine: Machine, world: int, sizes: Mapping[sympy.Symbol, int] = {}
) -> float:
    """A cost in numbers.

    Args:
        sizes: values of the graph's symbolic sizes.
    """
    return float(evaluated(cost.formula(machine, world), sizes))


def evaluated(found: Any, sizes: Mapping[sympy.Symbol, int] = {}) -> Any:
    """An amount as a number. Sizes that only data decide are `UNKNOWN`.

    Args:
        sizes: values of the graph's symbolic sizes.
    """
    if not isinstance(found, sympy.Expr):
        return found
    known = found.subs(sizes)
    return known.subs(dict.fromkeys(known.free_symbols, UNKNOWN))


def closed_form(costs: Iterable[Cost | Transfer]) -> sympy.Expr:
    """The sum of costs in symbols: sizes, `W` and the rates of `SYMBOLS`."""
    # Equal terms first: a model of many equal layers has few different ones.
    counts: dict[Any, int] = {}
    for cost in costs:
        term = sympy.sympify(cost.formula(SYMBOLS, WORLD))
        counts[term] = counts.get(term, 0) + 1
    total = sympy.Add(*(count * term for term, count in counts.items()))
    of_ranks = [term for term in total.args if term.has(WORLD)]
    shared = sympy.collect(
        sympy.expand(sympy.Add(*of_ranks)),
        (SYMBOLS.host_s, 1 / SYMBOLS.bandwidth, SYMBOLS.latency),
        sympy.factor,
    )
    return shared + sympy.Add(*(term for term in total.args if not term.has(WORLD)))


def amount(value: Any) -> Amount:
    """A size of a tensor, or what was computed from sizes."""
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression) if expression.is_number else expression
    return int(value)


def is_view(node: fx.Node) -> bool:
    """Whether a node costs nothing: its result shares memory with what it reads, or is part of it.

    What waits in `.grad` is added for nothing too: ranks that have something waiting plan as those that don't.
    """
    origin = node.meta.get("provenance")
    if node.target is operator.getitem or (origin is not None and origin.pass_name == PENDING):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def bytes_of(node: fx.Node) -> Amount:
    """Of the tensors that a node returns."""
    values = node.meta.get("val")
    found = values if isinstance(values, list | tuple) else [values]
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    return sum(amount(value.numel()) * value.element_size() for value in tensors)


def _base(node: fx.Node) -> fx.Node:
    """What a view looks at; a part of several results is itself."""
    while is_view(node) and node.target is not operator.getitem and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def fused(nodes: Iterable[fx.Node]) -> Cost:
    """Of nodes that are compiled to loops: what comes in is read once, what goes out is written once."""
    inside = dict.fromkeys(nodes)
    work = [node for node in inside if not is_view(node)]
    if not work:
        return Cost()
    read = {_base(n) for node in work for n in node.all_input_nodes} - inside.keys()
    written = [node for node in work if _leaves(node, inside)]
    total = sum((bytes_of(node) for node in (*read, *written)), 0)
    return Cost(bytes=total, operators=1)


def _leaves(node: fx.Node, inside: Mapping[fx.Node, None]) -> bool:
    return any(
        user not in inside or (is_view(user) and _leaves(user, inside)) for user in node.users
    )


def single(node: fx.Node) -> Cost:
    """Of a node that is a kernel by itself: a product, a codec, anything that is called as it is."""
    if (codec := _CODECS.get(_name(node))) is not None:
        return codec(node)
    size = bytes_of(node) + sum(bytes_of(n) for n in set(node.all_input_nodes))
    flops = _flops(node)
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) else value
    low = isinstance(first, torch.Tensor) and first.element_size() == 2
    return Cost(0 if low else flops, flops if low else 0, size, 1)


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _flops(node: fx.Node) -> Amount:
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet) or flop_registry.get(_STANDS_FOR.get(str(packet)))
    if count is None:
        return 0
    values = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return amount(count(*values[0], **values[1], out_val=node.meta["val"]))


aten = torch.ops.aten
# Attention for the CPU has no entry of its own in torch's table.
_STANDS_FOR: dict[str, Any] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
}


def _attention_backward(node: fx.Node) -> Cost:
    """Five products of the size of the forward's two."""
    grad, query, key = (n.meta["val"] for n in node.args[:3])  # type: ignore[union-attr]
    b, h, s_q, d = query.shape
    flops = 5 * 2 * amount(b) * amount(h) * amount(s_q) * amount(key.shape[2]) * amount(d)
    size = bytes_of(node) + sum(bytes_of(n) for n in set(node.all_input_nodes))
    low = grad.element_size() == 2
    return Cost(0 if low else flops, flops if low else 0, size, 1)


def _elements(node: Any) -> Amount:
    return amount(node.meta["val"].numel())


def _rows(node: Any) -> Amount:
    return amount(node.meta["val"].shape[0])


def _requantise(node: fx.Node) -> Cost:
    pieces, out_bits, lengths, shards, bits = (node.args[i] for i in (0, 4, 5, 6, 7))
    shard = -(-sum(lengths) // shards)  # type: ignore
    return Cost(
        operators=1,
        encoded=((f"int{out_bits}", shard),),
        decoded=((f"int{bits}", _rows(pieces) * shard),),
    )


_CODECS: dict[str, Callable[[Any], Cost]] = {
    "fxpasses::quantise": lambda n: Cost(
        operators=1, encoded=((f"int{n.args[5]}", _elements(n.args[0])),)
    ),
    "fxpasses::requantise": _requantise,
    "fxpasses::dequantise": lambda n: Cost(
        operators=1, decoded=((f"int{n.args[3]}", _rows(n.args[0]) * sum(n.args[1])),)
    ),
    "fxpasses::encode16": lambda n: Cost(operators=1, encoded=((n.args[3], _elements(n.args[0])),)),
    "fxpasses::decode16": lambda n: Cost(
        operators=1, decoded=((n.args[3], _rows(n.args[0]) * n.args[1]),)
    ),
    "fxpasses::topk_encode": lambda n: Cost(operators=1, encoded=(("topk", n.args[2]),)),
    "fxpasses::topk_decode": lambda n: Cost(operators=1, decoded=(("topk", n.args[1]),)),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


def transfer(node: fx.Node) -> Transfer:
    """What a launch puts on the wire."""
    payloads = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return Transfer(str(node.target._opname), sum((bytes_of(n) for n in payloads), 0))  # type: ignore[union-attr]


def sizes_of(graph: fx.Graph) -> dict[sympy.Symbol, int]:
    """The values with which the symbolic sizes of a graph were traced."""
    found: dict[sympy.Symbol, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        shape = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in shape:
            if not isinstance(size, torch.SymInt) or depends_on_data(size):
                continue
            if isinstance(size.node.expr, sympy.Symbol):
                found[size.node.expr] = int(size.node.hint)
    return found
