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
sums        the same, of a sum that is a gradient.
gradients   checked: a gradient as it is delivered; operand: the sum of its bits when it was made. Stops what
            hits it in between.
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
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import networkx as nx
from torch import fx

from fxpasses.faults.exits import CHECKS, Local, checks_of, made_by, reads_node, unstruck
from fxpasses.faults.flow import ENTRY, Flow, carries_tensor, flow_of
from fxpasses.faults.sites import computes, operator_sites, payload_sites
from fxpasses.faults.spec import BACKWARD, FORWARD, GRADIENT
from fxpasses.faults.ways import Above, Ways, nearest_behind
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
from fxpasses.rewrite import LOOPED, model_line, origin_of

_INJECTS = ("inject_forward", "inject", "inject_payload")
_REPLAYS = ("replay_forward", "replay_backward")
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


def analyse(graph: TrainingGraph) -> Recovery:
    """Find the recovery paths of a graph that passes have run over.

    In a joint graph what belongs to the forward is looked at: its backward is a graph of its own later.
    """
    flow = flow_of(graph)
    relevant = _relevant(graph, flow)
    sinks = [v for v in flow.graph if isinstance(v, Role) and _is_sink(v)]
    merges = [v for v in _merges(flow.graph) if v in relevant and not _is_written_by_guards(v)]
    sites = dict(_sites(graph, flow, relevant))
    checks, lost = checks_of(flow)
    stopped = Ways(flow.graph, sinks, checks)
    ways = {site: path for site in sites if (path := stopped.way(site)) is not None}
    behind = nearest_behind(flow.graph, sinks, (v for path in ways.values() for v in path[:-1]))
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
                _next_place(site, behind, flow),
            )
            for site, path in ways.items()
        ),
    )


def _sites(
    graph: TrainingGraph, flow: Flow, relevant: set[Hashable]
) -> Iterator[tuple[Hashable, str]]:
    """What faults can hit, with the phase; within subgraphs the results of operators as well."""
    for phase in (FORWARD, BACKWARD):
        for node, site in operator_sites(graph, phase):
            if node in relevant:
                yield node, site.phase
    for node, block in flow.blocks.items():
        is_own = node.op == "call_function" and "provenance" not in node.meta
        if block != ENTRY and node in relevant and is_own and computes(node):
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
        looped = origin_of(node).rule == LOOPED
        if "provenance" in node.meta and not struck and not looped:
            pending += node.all_input_nodes
        elif node.op == "call_function":
            found[node] = None
    return [n for n in graph.walk() if n in found]


def _split_off(flow: nx.DiGraph, node: fx.Node) -> Local:
    """A vertex between a gradient and what becomes of it: the output, or what passes wrote for it."""
    local = Local(node)
    for reader in list(flow.successors(node)):
        is_output = isinstance(reader, Role) and reader.kind == "gradient"
        is_pass = isinstance(reader, fx.Node) and "provenance" in reader.meta
        if is_output or (is_pass and not reads_node(reader)):
            flow.remove_edge(node, reader)
            flow.add_edge(local, reader)
    flow.add_edge(node, local)
    return local


def _merges(flow: nx.DiGraph) -> list[fx.Node]:
    """Operators with two inputs or more of which neither is computed from the other."""
    above = Above(flow)
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
    return made_by(node, (*CHECKS, *_INJECTS, *_REPLAYS)) or origin_of(node).rule == "alarm"


def _next_place(site: Hashable, behind: Mapping[Hashable, Hashable], flow: Flow) -> Place | None:
    """The nearest node that all ways lead through."""
    following = behind.get(site)
    if isinstance(following, Local):
        following = behind.get(following)
    return _place(following, flow) if isinstance(following, fx.Node) else None


def _places(path: Sequence[Hashable], flow: Flow) -> tuple[Place, ...]:
    """The places of a path; a gradient and its node are one."""
    before = [None, *path]
    return tuple(
        _place(v, flow)
        for b, v in zip(before, path, strict=False)
        if not (isinstance(v, Local) and v.node is b)
    )


def _place(vertex: Any, flow: Flow) -> Place:
    if isinstance(vertex, Local):
        vertex = unstruck(vertex.node)
    if isinstance(vertex, Role):
        return Place(f"{vertex.kind} {vertex.name}")
    if not isinstance(vertex, fx.Node):
        return Place(str(vertex))
    name = operator_name(vertex) if vertex.op == "call_function" else ""
    line = model_line(vertex) or origin_of(vertex).model_line
    return Place(vertex.name, name, flow.blocks[vertex], line)
