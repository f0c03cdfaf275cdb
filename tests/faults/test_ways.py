"""Ways past checks, on graphs of numbers; and against a search of all paths."""

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpasses.faults.ways import Check, nearest_behind, unguarded_ways


def ways(edges, sites, sinks, *checks):
    flow = nx.DiGraph(edges)
    given = [Check(str(i), checked, operands) for i, (checked, operands) in enumerate(checks)]
    return unguarded_ways(flow, sites, sinks, given)


def test_a_check_that_dominates():
    line = [("o", "s"), ("s", "r"), ("r", "end")]
    assert ways(line, ["s"], ["end"]) == {"s": ["s", "r", "end"]}
    assert ways(line, ["s"], ["end"], ("r", ("o",))) == {}
    # both sides of the comparison are hit
    assert ways(line, ["s", "o"], ["end"], ("r", ("s",))) == {
        "s": ["s", "r", "end"],
        "o": ["o", "s", "r", "end"],
    }


def test_a_way_past_a_check():
    edges = [("s", "r"), ("r", "end"), ("s", "a"), ("a", "b"), ("b", "end")]
    assert ways(edges, ["s"], ["end"], ("r", ())) == {"s": ["s", "a", "b", "end"]}
    assert ways(edges, ["s"], ["end"], ("r", ()), ("b", ())) == {}
    assert ways(edges, ["s"], ["end"], ("r", ()), ("b", ("a",))) == {"s": ["s", "a", "b", "end"]}


@st.composite
def flows(draw):
    size = draw(st.integers(2, 9))
    pairs = [(a, b) for b in range(size) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True))
    vertex = st.integers(0, size - 1)
    # An operand stands in front of what is checked.
    check = vertex.flatmap(
        lambda c: st.tuples(
            st.just(c), st.sets(st.integers(0, c - 1), max_size=2) if c else st.just(set())
        )
    )
    return (
        size,
        edges,
        draw(st.sets(vertex, min_size=1, max_size=3)),
        draw(st.lists(check, max_size=4)),
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(flows())
def test_ways_are_those_of_a_search_of_all_paths(given_flow):
    size, edges, ends, checks = given_flow
    flow = nx.DiGraph(edges)
    flow.add_nodes_from(range(size))
    found = unguarded_ways(
        flow, range(size), ends, [Check("", checked, tuple(of)) for checked, of in checks]
    )

    def paths(a, b):
        return [[a]] if a == b else list(nx.all_simple_paths(flow, a, b))

    for site in range(size):
        stops = {c for c, of in checks if not any(paths(site, operand) for operand in of)}
        open_ways = [p for end in ends for p in paths(site, end) if not stops.intersection(p)]
        assert (site in found) == bool(open_ways)
        if site in found:
            assert found[site] in open_ways
            assert len(found[site]) == min(map(len, open_ways))


def test_the_nearest_place_behind():
    edges = [("s", "a"), ("s", "b"), ("a", "c"), ("b", "c"), ("c", "d"), ("d", "end")]
    flow = nx.DiGraph(edges)
    assert nearest_behind(flow, ["end"], ["s", "a", "d"]) == {"s": "c", "a": "c", "d": "end"}
    assert nearest_behind(flow, ["end", "b"], ["s"]) == {}
