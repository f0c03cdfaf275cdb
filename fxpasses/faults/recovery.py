"""Recovery paths: which faults can come to an update of a parameter without a guard that stops them.

    site (a value that faults hit) ─▶ … ─▶ [checked value] ─▶ … ─▶ sink (gradient, state, written buffer)
                                                └▶ verdict ─▶ alarm (state) ─▶ raise, skip or recompute

Static: over the graph after all passes, whatever the values are. A checked value *stops* a fault if the check
compares it with other values, its operands, and the fault can come to the checked value and to none of the
operands. Then the two don't agree; were both hit, they could. A site is unguarded if one way to a sink meets no
checked value that stops its fault. So, of each guard:

products    checked: the result of a product; operands: its factors, and what is added to them. Stops what
            hits the product itself, up to its result; neither what hits a factor before, nor what is computed
            of the result.
payloads    dense: checked is the reduced bucket, operand what went in. Compressed: checked is what arrived,
            operand the payload without its checksum. Either stops what hits the payload between its sums or
            seal and its arrival; neither what hit gradients before, nor a payload that is stale but whole.
values, overflow    stop nothing here: most flipped bits leave a value that is finite, and below a limit.
digest      stops nothing here: it stands on the host, behind the update.

A verdict counts if it leads to the alarm that the host reads before a step. That the check's threshold sees
a fault that it stops is a matter of sizes, and measured elsewhere. What passes wrote themselves is hit by no
fault; `stale`, `delay`, `missing` and `exit` are no wrong values and not looked at.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import networkx as nx
from torch import fx

from fxpasses.effects import is_launch, is_wait
from fxpasses.faults.flow import ENTRY, Flow, carries_tensor, flow_of
from fxpasses.faults.sites import computes, operator_sites, payload_sites
from fxpasses.faults.spec import BACKWARD, FORWARD, GRADIENT
from fxpasses.graph import (
    ALARM,
    FAULT_NEWS,
    FAULT_TABLE,
    OVERFLOW_STATE,
    STALE,
    Role,
    TrainingGraph,
)
from fxpasses.precision import operator_name
from fxpasses.rewrite import Provenance, model_line

_PRODUCTS = ("check_products", "check_gradient_products")
_PAYLOADS = "check_payloads"
_CHECKS = (*_PRODUCTS, _PAYLOADS)
# They read the node of a gradient, not what a fault of phase `gradient` makes of it.
_OF_NODES = (*_PRODUCTS, "check_values")
_INJECTS = ("inject_forward", "inject", "inject_payload")
_SINKS = ("gradient", "input_gradient", "mutation")  # states besides
# States that no update reads.
_ASIDE = (ALARM, FAULT_NEWS, FAULT_TABLE, OVERFLOW_STATE)


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in the flow.

    Attributes:
        name: of the node, or the kind and name of an output.
        operator: that makes it; empty for inputs and outputs.
        block: the subgraph that it is in.
        model_line: `file:line` of the user's code; may be empty.
    """

    name: str
    operator: str = ""
    block: str = ENTRY
    model_line: str = ""

    def __str__(self) -> str:
        inside = "" if self.block == ENTRY else f" in {self.block}"
        return f"{self.name}{inside}" + (f" ({self.model_line})" if self.model_line else "")


@dataclasses.dataclass(frozen=True)
class Unguarded:
    """A site from which a fault comes to an update unnoticed.

    Attributes:
        phase: one of `faults.spec.PHASES`.
        path: from the site to a sink, both included; a shortest one.
        passes: the nearest place behind the site that lies on all of its ways to sinks, if there is one: a
            check there, with operands that stand before the site, would stop the fault.
    """

    phase: str
    path: tuple[Place, ...]
    passes: Place | None

    @property
    def site(self) -> Place:
        return self.path[0]

    def __str__(self) -> str:
        return f"{self.phase}: " + " -> ".join(map(str, self.path))


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What was found in one graph.

    Attributes:
        blocks: the graph, its subgraphs, and the guards ("exit …"), each a block of control flow.
        unreachable: those that nothing comes to: subgraphs that are never run, and guards whose verdict does
            not lead to the alarm.
        merges: how many values on the way to a sink are computed from two independent ones or more, where
            none of the two is computed from the other.
        unchecked: those of them at which a fault is unguarded.
        sites: how many sites have a way to a sink.
        unguarded: those of them that have one past all guards.
    """

    blocks: tuple[str, ...]
    unreachable: tuple[str, ...]
    merges: int
    unchecked: tuple[Place, ...]
    sites: int
    unguarded: tuple[Unguarded, ...]

    @property
    def connectivity(self) -> float:
        """Share of blocks that are reachable."""
        return 1 - len(self.unreachable) / len(self.blocks)

    @property
    def completeness(self) -> float:
        """Share of merge points that are checked; 1 without any."""
        return 1 - len(self.unchecked) / self.merges if self.merges else 1.0

    def holds(self, threshold: float) -> bool:
        """Whether all blocks are reachable, and as many merge points checked as are asked for."""
        return not self.unreachable and self.completeness >= threshold

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        shares = {"connectivity": self.connectivity, "completeness": self.completeness}
        return {**shares, **dataclasses.asdict(self)}

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        lines = [
            f"control flow: {self.connectivity:.1%} of {len(self.blocks)} blocks reachable",
            *(f"    unreachable: {name}" for name in self.unreachable),
            f"data dependencies: {self.completeness:.1%} of {self.merges} merge points checked",
            f"sites: {len(self.unguarded)} of {self.sites} reach an update unguarded",
            *(f"    {site}" for site in self.unguarded),
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Check:
    """A comparison: of a value in the flow, with others."""

    name: str
    checked: Hashable
    operands: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class _Local:
    """A gradient as faults of phase `gradient` hit it: what other readers of its node see stays right."""

    node: fx.Node


def analyse(graph: TrainingGraph) -> Recovery:
    """Find the recovery paths of a graph that passes have run over.

    In a joint graph what belongs to the forward is looked at: its backward is a graph of its own later.
    """
    flow = flow_of(graph)
    relevant = _relevant(graph, flow)
    sinks = [v for v in flow.graph if isinstance(v, Role) and _is_sink(v)]
    merges = [v for v in _merges(flow.graph) if v in relevant and not _is_written_by_guards(v)]
    sites = dict(_sites(graph, flow, relevant))
    checks, lost = _checks(flow)
    stopped = _Stopped(flow.graph, sinks, checks)
    ways = {site: path for site in sites if (path := stopped.way(site)) is not None}
    behind = _behind(flow.graph, sinks, ways)
    exits = [f"exit {check.name}" for check in checks]
    unreachable = [*flow.unreachable, *(f"exit {name}" for name in lost)]
    return Recovery(
        blocks=(*flow.reachable, *exits, *unreachable),
        unreachable=tuple(unreachable),
        merges=sum(map(stopped.reaches, merges)),
        unchecked=tuple(_place(v, flow) for v in merges if stopped.way(v) is not None),
        sites=sum(map(stopped.reaches, sites)),
        unguarded=tuple(
            Unguarded(
                sites[site],
                _places(path, flow),
                _place(behind[site], flow) if site in behind else None,
            )
            for site, path in ways.items()
        ),
    )


def unguarded_ways(
    flow: nx.DiGraph,
    sites: Iterable[Hashable],
    sinks: Iterable[Hashable],
    checks: Sequence[Check],
) -> dict[Hashable, list[Hashable]]:
    """Of each site that has one, a shortest way to a sink that meets no checked value which stops its fault."""
    stopped = _Stopped(flow, sinks, checks)
    return {site: path for site in sites if (path := stopped.way(site)) is not None}


class _Stopped:
    """Ways to sinks around checked values; kept for each set of these."""

    def __init__(
        self, flow: nx.DiGraph, sinks: Iterable[Hashable], checks: Sequence[Check]
    ) -> None:
        self._back = flow.reverse(copy=False)
        self._sinks = [sink for sink in sinks if sink in flow]
        self._by_site: dict[Hashable, set[Hashable]] = {}
        self._next: dict[frozenset[Hashable], dict[Hashable, Hashable]] = {}
        above = _Above(flow)
        for check in checks:
            for site in above.between(check.operands, check.checked):
                self._by_site.setdefault(site, set()).add(check.checked)

    def reaches(self, site: Hashable) -> bool:
        """Whether it has a way to a sink at all."""
        return site in self._towards(frozenset())

    def way(self, site: Hashable) -> list[Hashable] | None:
        stops = frozenset(self._by_site.get(site, ()))
        if site in stops:
            return None
        following = self._towards(stops)
        if site not in following:
            return None
        path = [site]
        while following[path[-1]] is not None:
            path.append(following[path[-1]])
        return path

    def _towards(self, stops: frozenset[Hashable]) -> dict[Hashable, Hashable]:
        """For each vertex with a way to a sink the next one on a shortest; None for sinks."""
        if stops not in self._next:
            found: dict[Hashable, Hashable] = dict.fromkeys(
                s for s in self._sinks if s not in stops
            )
            pending = list(found)
            for vertex in pending:  # grows
                for before in self._back[vertex]:
                    if before not in found and before not in stops:
                        found[before] = vertex
                        pending.append(before)
            self._next[stops] = found
        return self._next[stops]


class _Above:
    """What vertices are computed from, as bits: one for each vertex, or for all of a loop."""

    def __init__(self, flow: nx.DiGraph) -> None:
        self._whole = nx.condensation(flow)
        self._part: dict[Hashable, int] = self._whole.graph["mapping"]
        self._above: dict[int, int] = {}
        for i in nx.topological_sort(self._whole):
            bits = 1 << i
            for before in self._whole.pred[i]:
                bits |= self._above[before]
            self._above[i] = bits

    def of(self, vertex: Hashable) -> int:
        """Its own bit, and those of all above it."""
        return self._above[self._part[vertex]]

    def independent(self, a: Hashable, b: Hashable) -> bool:
        """Whether neither is computed from the other."""
        return not self.of(a) >> self._part[b] & 1 and not self.of(b) >> self._part[a] & 1

    def between(self, operands: Iterable[Hashable], checked: Hashable) -> Iterator[Hashable]:
        """The places at which a fault comes to the checked value, and to no operand."""
        bits = self.of(checked)
        for operand in operands:
            bits &= ~self.of(operand)
        while bits:
            lowest = bits & -bits
            yield from self._whole.nodes[lowest.bit_length() - 1]["members"]
            bits ^= lowest


def _behind(
    flow: nx.DiGraph, sinks: Iterable[Hashable], sites: Iterable[Hashable]
) -> dict[Hashable, Hashable]:
    """Of each site the nearest place that all of its ways lead through (its dominator, seen from the sinks)."""
    end = object()
    back = nx.DiGraph((b, a) for a, b in flow.edges)
    back.add_edges_from((end, sink) for sink in sinks)
    if end not in back:
        return {}
    nearest = nx.immediate_dominators(back, end)
    found = {}
    for site in sites:
        place = nearest[site]
        found[site] = nearest[place] if isinstance(place, _Local) else place
    return {site: place for site, place in found.items() if isinstance(place, fx.Node)}


def _checks(flow: Flow) -> tuple[list[Check], list[str]]:
    """The guards that count, and the names of those whose verdict leads to no alarm."""
    order = {node: i for i, node in enumerate(flow.blocks)}
    own = [n for n in flow.blocks if _made_by(n, _CHECKS) and _origin(n).rule == "checksum"]
    whole = nx.weakly_connected_components(flow.graph.subgraph(own))
    parts = [sorted(part, key=order.__getitem__) for part in whole]
    parts.sort(key=lambda part: order[part[0]])
    alarms = [v for v in flow.graph if isinstance(v, Role) and v == Role("state", f"{ALARM}/")]
    heard = set().union(*(nx.ancestors(flow.graph, alarm) for alarm in alarms))
    found, lost = [], []
    for part in parts:
        if any(operator_name(node) == "seal" for node in part):
            continue  # writes a checksum, and compares none
        check = _check(flow, part)
        if check is not None and heard.intersection(part):
            found.append(check)
        else:
            lost.append(_check_name(part))
    return found, lost


def _check(flow: Flow, part: Sequence[fx.Node]) -> Check | None:
    reads = _reads(flow, part)
    name, origin = _check_name(part), _origin(part[0])
    if origin.pass_name == _PAYLOADS:
        arrived = next((r for r in map(_node, reads) if _arrives(r)), None)
        if arrived is None:
            return None
        payload = _unstruck(_launch_of(arrived).all_input_nodes[0])
        sealed = _made_by(payload, (_PAYLOADS,))
        given = _reads(flow, [payload]) if sealed else [r for r in reads if _node(r) is payload]
        return Check(name, arrived, tuple(given)) if given else None
    result = next((r for r in reads if _unstruck(_node(r)).name == origin.source), None)
    operands = tuple(r for r in reads if r is not result)
    return None if result is None else Check(name, result, operands)


def _check_name(part: Sequence[fx.Node]) -> str:
    origin = _origin(part[0])
    return f"{origin.pass_name}: {origin.source or part[0].name}"


def _reads(flow: Flow, part: Sequence[fx.Node]) -> list[fx.Node | _Local]:
    """What a check reads, each once."""
    own = set(part)
    before = itertools.chain.from_iterable(flow.graph.pred[node] for node in part)
    return [n for n in dict.fromkeys(before) if n not in own]


def _arrives(node: fx.Node) -> bool:
    """Whether a node is what a collective brought, or a fault's in its place."""
    return is_wait(node) or ("fault" in node.meta and _origin(node).rule == "stale")


def _node(vertex: fx.Node | _Local) -> fx.Node:
    return vertex.node if isinstance(vertex, _Local) else vertex


def _launch_of(arrived: fx.Node) -> fx.Node:
    """The launch of what a wait, or a fault behind it, brings."""
    node = arrived
    while not is_launch(node):
        node = next(n for n in node.all_input_nodes if is_wait(n) or is_launch(n))
    return node


def _unstruck(node: fx.Node) -> fx.Node:
    """The value that faults of option `faults` were put on."""
    if "fault" not in node.meta:
        return node
    name = node.meta["fault"].name
    return next((n for n in node.graph.nodes if n.name == name), node)


def _sites(
    graph: TrainingGraph, flow: Flow, relevant: set[Hashable]
) -> Iterator[tuple[Hashable, str]]:
    """What faults can hit, with the phase; within subgraphs the results of operators as well."""
    for phase in (FORWARD, BACKWARD):
        for node, site in operator_sites(graph, phase):
            if node in relevant:
                yield node, site.phase
    for node, block in flow.blocks.items():
        if block != ENTRY and node in relevant and node.op == "call_function" and computes(node):
            yield node, FORWARD if _is_joint(graph) else BACKWARD
    for launch, site in payload_sites(graph):
        if launch in relevant:
            yield launch, site.phase
    if not _is_joint(graph):
        for node in _local_gradients(graph):
            yield _split_off(flow.graph, node), GRADIENT


def _relevant(graph: TrainingGraph, flow: Flow) -> set[Hashable]:
    if not _is_joint(graph):
        return set(flow.graph)
    ends = [v for v in flow.graph if isinstance(v, Role) and v.kind in ("output", "mutation")]
    return set().union(*(nx.ancestors(flow.graph, end) for end in ends))


def _is_joint(graph: TrainingGraph) -> bool:
    """Whether forward and backward are one graph, yet to be split."""
    return bool(graph.inputs("tangent")) and bool(graph.outputs("output"))


def _local_gradients(graph: TrainingGraph) -> list[fx.Node]:
    """The gradients before passes worked on them: behind them stands what passes wrote."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    pending = [g.node for g in graph.gradients()]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        struck = "fault" in node.meta and node.meta["fault"].phase in (FORWARD, BACKWARD)
        if "provenance" in node.meta and not struck:
            pending += node.all_input_nodes
        elif node.op == "call_function":
            found[node] = None
    return [n for n in graph.walk() if n in found]


def _split_off(flow: nx.DiGraph, node: fx.Node) -> _Local:
    """A vertex between a gradient and what becomes of it: the output, or what passes wrote for it."""
    local = _Local(node)
    for reader in list(flow.successors(node)):
        is_output = isinstance(reader, Role) and reader.kind == "gradient"
        is_pass = isinstance(reader, fx.Node) and "provenance" in reader.meta
        if is_output or (is_pass and not _made_by(reader, _OF_NODES)):
            flow.remove_edge(node, reader)
            flow.add_edge(local, reader)
    flow.add_edge(node, local)
    return local


def _merges(flow: nx.DiGraph) -> list[fx.Node]:
    """Operators with two inputs or more of which neither is computed from the other."""
    above = _Above(flow)
    found = []
    for vertex in flow:
        if isinstance(vertex, fx.Node) and vertex.op == "call_function" and carries_tensor(vertex):
            inputs = [v for v in flow.pred[vertex] if isinstance(v, fx.Node) and carries_tensor(v)]
            if any(above.independent(a, b) for a, b in itertools.combinations(inputs, 2)):
                found.append(vertex)
    return found


def _is_sink(role: Role) -> bool:
    if role.kind != "state":
        return role.kind in _SINKS
    kind = role.name.split("/")[0]
    return kind not in _ASIDE and not kind.startswith(STALE)


def _is_written_by_guards(node: fx.Node) -> bool:
    return _made_by(node, (*_CHECKS, *_INJECTS)) or _origin(node).rule == "alarm"


def _made_by(node: Any, names: Iterable[str]) -> bool:
    return isinstance(node, fx.Node) and _origin(node).pass_name in names


def _origin(node: fx.Node) -> Provenance:
    return node.meta.get("provenance", Provenance("", ""))


def _places(path: Sequence[Hashable], flow: Flow) -> tuple[Place, ...]:
    """The places of a path; a gradient and its node are one."""
    before = [None, *path]
    return tuple(
        _place(v, flow)
        for b, v in zip(before, path, strict=False)
        if not (isinstance(v, _Local) and v.node is b)
    )


def _place(vertex: Any, flow: Flow) -> Place:
    if isinstance(vertex, _Local):
        vertex = _unstruck(vertex.node)
    if isinstance(vertex, Role):
        return Place(f"{vertex.kind} {vertex.name}")
    if not isinstance(vertex, fx.Node):
        return Place(str(vertex))
    name = operator_name(vertex) if vertex.op == "call_function" else ""
    line = model_line(vertex) or _origin(vertex).model_line
    return Place(vertex.name, name, flow.blocks[vertex], line)
