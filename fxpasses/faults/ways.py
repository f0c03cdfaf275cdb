"""Ways through a flow of values past checks: graphs alone, whatever their vertices are.

    operand ─▶ site ─▶ … ─▶ checked ─▶ … ─▶ sink

A check compares a value with its operands. It stops a fault at a place from which the checked value is reached,
and no operand: then the two don't agree. Were both hit, they could.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence

import networkx as nx


@dataclasses.dataclass(frozen=True)
class Check:
    """A comparison: of a value in the flow, with others."""

    name: str
    checked: Hashable
    operands: tuple[Hashable, ...]


def unguarded_ways(
    flow: nx.DiGraph,
    sites: Iterable[Hashable],
    sinks: Iterable[Hashable],
    checks: Sequence[Check],
) -> dict[Hashable, list[Hashable]]:
    """Of each site that has one, a shortest way to a sink that meets no checked value which stops its fault."""
    stopped = Ways(flow, sinks, checks)
    return {site: path for site in sites if (path := stopped.way(site)) is not None}


class Ways:
    """Ways to sinks around checked values; kept for each set of these."""

    def __init__(
        self, flow: nx.DiGraph, sinks: Iterable[Hashable], checks: Sequence[Check]
    ) -> None:
        self._back = flow.reverse(copy=False)
        self._sinks = [sink for sink in sinks if sink in flow]
        self._by_site: dict[Hashable, set[Hashable]] = {}
        self._next: dict[frozenset[Hashable], dict[Hashable, Hashable]] = {}
        above = Above(flow)
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


class Above:
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


def nearest_behind(
    flow: nx.DiGraph, sinks: Iterable[Hashable], sites: Iterable[Hashable]
) -> dict[Hashable, Hashable]:
    """Of each site the nearest place that all of its ways to sinks lead through (its dominator, seen from the
    sinks), if there is one.
    """
    end = object()
    back = nx.DiGraph((b, a) for a, b in flow.edges)
    back.add_edges_from((end, sink) for sink in sinks)
    if end not in back:
        return {}
    nearest = nx.immediate_dominators(back, end)
    return {site: nearest[site] for site in sites if nearest[site] is not end}
