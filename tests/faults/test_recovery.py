"""Recovery paths, on graphs of which the answer is known; and against faults that happen."""

import dataclasses
import json

import networkx as nx
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpasses.faults.flow import OUTSIDE, flow_of
from fxpasses.faults.recovery import analyse
from fxpasses.faults.trials import Shot, Trials, options_of
from fxpasses.graph import ALARM, Role, TrainingGraph
from fxpasses.observers import watching
from fxpasses.passes.check_gradients import CheckGradients
from fxpasses.passes.check_products import CheckGradientProducts, CheckProducts
from fxpasses.passes.check_sums import CheckSums
from fxpasses.passes.check_values import CheckValues
from fxpasses.passes.inject import Inject
from fxpasses.passes.replay import ReplayBackward
from fxpasses.testing import capture
from fxpasses.trace import trace
from tests.faults.programs import small
from tests.graphs import checked, mlp, nodes_with, traced

cond, while_loop, map_impl = (
    getattr(torch.ops.higher_order, name) for name in ("cond", "while_loop", "map_impl")
)
SQUARE = torch.ones(4, 4)


def guarded(fn, *examples):
    """A backward written by hand, its products checked."""
    graph = traced(fn, *examples)
    checked(graph, CheckGradientProducts())
    return graph


def looped(fn, *examples):
    """As `traced`; while_loop makes sizes that only run time knows."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        module = make_fx(fn)(*(torch.empty_strided(x.shape, x.stride()) for x in examples))
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["role"] = Role("tangent", node.name)
    output = module.graph.output_node()
    output.args = (tuple(output.args[0]),)
    output.meta["roles"] = tuple(Role("gradient", f"p{i}") for i in range(len(output.args[0])))
    return TrainingGraph(module)


def sites(recovery):
    """(phase, block and name) of what is unguarded."""
    return {
        (u.phase, u.site.name if u.site.block == "graph" else f"{u.site.block}.{u.site.name}")
        for u in recovery.unguarded
    }


def names(places):
    return [place.name for place in places]


def two_products(x, w, v):
    return [(x @ w).relu() @ v]


def test_without_guards_all_sites_are_unguarded():
    found = analyse(traced(two_products, SQUARE, SQUARE, SQUARE))
    assert sites(found) == {
        ("backward", "mm"),
        ("backward", "relu"),
        ("backward", "mm_1"),
        ("gradient", "mm_1"),
    }
    assert (found.sites, found.merges, found.completeness) == (4, 2, 0.0)
    assert not found.holds(threshold=0.01) and found.holds(threshold=0.0)


def test_a_checked_product_stops_its_own_fault_and_no_other():
    found = analyse(guarded(two_products, SQUARE, SQUARE, SQUARE))
    assert sites(found) == {("backward", "relu"), ("gradient", "mm_1")}
    (of_relu,) = [u for u in found.unguarded if u.phase == "backward"]
    assert names(of_relu.path) == ["relu", "mm_1", "gradient p0"]
    assert of_relu.passes.name == "mm_1"
    assert (found.sites, found.merges, found.completeness) == (4, 2, 1.0)
    assert found.blocks == (
        "graph",
        "exit check_gradient_products: mm",
        "exit check_gradient_products: mm_1",
    )
    assert found.holds(threshold=1.0)


def test_limits_and_finiteness_stop_no_flip():
    graph = traced(two_products, SQUARE, SQUARE, SQUARE)
    checked(graph, CheckValues("values=inf"))
    found = analyse(graph)
    assert len(found.unguarded) == found.sites == 4 and found.blocks == ("graph",)


@pytest.mark.parametrize("faults", ["", "bitflip where=gradient", "nan where=backward"])
def test_a_gradient_is_followed_to_where_it_is_delivered(faults):
    graph = traced(lambda x, w: [x @ w, x.sum(0), x * w], SQUARE, SQUARE)
    checked(graph, CheckSums(), CheckGradientProducts(), CheckGradients(), Inject(faults))
    found = analyse(graph)
    assert sites(found) == {("backward", "mul")} and found.sites == 6
    checked(graph := traced(two_products, SQUARE, SQUARE, SQUARE), CheckGradients())
    assert ("gradient", "mm_1") not in sites(analyse(graph))


def test_a_gradient_is_followed_to_its_bucket():
    model, args = nn.Linear(32, 32), (torch.ones(4, 32),)
    for faults in ("", "bitflip{where=gradient};bitflip{where=payload}"):
        options = {"guards": "gradients,payloads,products", "faults": faults}
        found = analyse(trace(model, args, options, world=2)[-1].after)
        assert sites(found) == set() and found.sites > 4 and not found.unreachable


def test_the_verdict_has_to_lead_to_the_alarm():
    graph = guarded(two_products, SQUARE, SQUARE, SQUARE)
    (came_in,) = [node for node, role in graph.inputs("state") if role.name == f"{ALARM}/"]
    graph.write_state(f"{ALARM}/", came_in)
    found = analyse(graph)
    assert found.unreachable == (
        "exit check_gradient_products: mm",
        "exit check_gradient_products: mm_1",
    )
    assert found.connectivity == pytest.approx(1 / 3) and not found.holds(threshold=0.0)
    assert len(found.unguarded) == found.sites == 4


@pytest.mark.parametrize("cut", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_each_guard_that_is_cut_off_is_found(cut):
    graph = guarded(lambda a, b, c, d: [a @ b @ c @ d], SQUARE, SQUARE, SQUARE, SQUARE)
    products = ["mm", "mm_1", "mm_2"]
    verdicts = {
        node.meta["provenance"].source: node
        for node in graph.walk()
        if any(is_alarm(user) for user in node.users) and not is_alarm(node)
    }
    assert list(verdicts) == products
    left = next(verdicts[name] for i, name in enumerate(products) if i not in cut)
    for i in cut:
        for reader in list(verdicts[products[i]].users):
            reader.replace_input_with(verdicts[products[i]], left)
    found = analyse(graph)
    assert found.unreachable == tuple(f"exit check_gradient_products: {products[i]}" for i in cut)
    assert sites(found) - {("gradient", "mm_2")} == {("backward", products[i]) for i in cut}


def is_alarm(node):
    return "provenance" in node.meta and node.meta["provenance"].rule == "alarm"


def test_a_check_that_reads_another_value_counts_for_nothing():
    graph = guarded(lambda x, w: [x @ w], SQUARE, SQUARE)
    (product,) = nodes_with(graph, torch.ops.aten.mm.default)
    with graph.graph.inserting_before(product):
        other = graph.graph.call_function(torch.ops.aten.mm.default, product.args)
    other.meta["val"] = product.meta["val"]
    for reader in list(product.users):
        if "provenance" in reader.meta:
            reader.replace_input_with(product, other)
    found = analyse(graph)
    assert found.unreachable == ("exit check_gradient_products: mm",)
    assert ("backward", "mm") in sites(found)


def test_faults_in_the_graph_change_nothing_about_its_paths():
    graph = guarded(two_products, SQUARE, SQUARE, SQUARE)
    before = analyse(graph)
    checked(graph, Inject("bitflip where=backward;nan where=backward;bitflip where=gradient"))
    after = analyse(graph)
    assert sites(after) == sites(before)
    assert (after.blocks, after.sites, after.merges) == (before.blocks, before.sites, before.merges)


def test_what_is_computed_from_the_other_is_no_merge():
    found = analyse(traced(lambda x, y: [x + x.relu(), x.cos() + x, x * y], SQUARE, SQUARE))
    assert found.merges == 1 and names(found.unchecked) == ["mul"]


def test_branches():
    def branch(x, w):
        g = x @ w
        (g,) = cond(x.sum() > 0, lambda g: (g.relu(),), lambda g: (g * 2,), (g,))
        return [g]

    found = analyse(guarded(branch, SQUARE, SQUARE))
    assert sites(found) == {
        ("backward", "sum_1"),  # which branch is taken
        ("backward", "true_graph_0.relu"),
        ("backward", "false_graph_0.mul"),
        ("backward", "getitem"),
        ("gradient", "getitem"),
    }
    paths = {u.site.name: names(u.path) for u in found.unguarded if u.phase == "backward"}
    assert paths["sum_1"] == ["sum_1", "gt", "cond", "getitem", "gradient p0"]
    assert paths["relu"] == ["relu", "getitem", "gradient p0"]
    assert found.blocks[:3] == ("graph", "true_graph_0", "false_graph_0")
    assert found.connectivity == 1.0 and not found.unreachable
    assert (found.merges, names(found.unchecked)) == (2, ["getitem"])


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_that_is_never_taken(taken):
    def branch(x, w):
        def inner(g):
            return cond(g.sum() > 0, lambda g: (g + 1,), lambda g: (g * 3,), (g,))

        condition = torch.full((), taken).clone()
        return [cond(condition, inner, inner, (x @ w,))[0]]

    found = analyse(guarded(branch, SQUARE, SQUARE))
    dead = "false_graph_0" if taken else "true_graph_0"
    assert set(found.unreachable) == {
        dead,
        f"{dead}.true_graph_0",
        f"{dead}.false_graph_0",
    }
    assert found.connectivity == pytest.approx(1 - 3 / 8)
    assert not any(u.site.block.startswith(dead) for u in found.unguarded)
    assert not found.holds(threshold=0.0)


def test_loops():
    def loop(x, w):
        return [while_loop(lambda a, b: a.sum() < 9, lambda a, b: (a * 2 + b,), (x @ w,), (w,))[0]]

    graph = looped(loop, SQUARE, SQUARE)
    flow = flow_of(graph).graph
    by_name = {(n.graph is graph.graph, n.name): n for n in flow if isinstance(n, torch.fx.Node)}
    product, body = by_name[True, "mm"], by_name[False, "add"]
    assert nx.has_path(flow, body, by_name[False, "mul"])  # the next time round
    assert nx.has_path(flow, body, by_name[False, "sum_1"])
    assert flow.has_edge(product, by_name[True, "getitem"])  # the loop may run no time
    checked(graph, CheckGradientProducts())
    found = analyse(graph)
    assert sites(found) == {
        ("backward", "while_loop_cond_graph_0.sum_1"),
        ("backward", "while_loop_body_graph_0.mul"),
        ("backward", "while_loop_body_graph_0.add"),
        ("backward", "getitem"),
        ("gradient", "getitem"),
    }
    assert found.connectivity == 1.0


def test_maps():
    found = analyse(
        traced(
            lambda x, w: [map_impl(lambda a, b: (a * b,), (x,), (w[0],))[0]],
            SQUARE,
            SQUARE,
        )
    )
    assert ("backward", "body_graph_0.mul") in sites(found)
    assert (found.merges, names(found.unchecked)) == (1, ["mul"])


def test_a_block_that_nothing_calls():
    graph = guarded(two_products, SQUARE, SQUARE, SQUARE)
    graph.module.add_module("left", traced(lambda x: [x * 2], SQUARE).module)
    with graph.graph.inserting_before(graph.first_call):
        graph.graph.get_attr("left")
    assert analyse(graph).unreachable == ("left",)


def test_the_forward_comes_to_gradients_through_the_program_too():
    graph = capture(nn.Sequential(*mlp(4, 5, 6), nn.Linear(6, 2)), torch.ones(3, 4)).joint
    found = analyse(graph)
    assert [(u.phase, u.site.name) for u in found.unguarded] == [
        ("forward", name) for name in ("addmm", "relu", "addmm_1", "relu_1", "addmm_2")
    ]
    last = names(found.unguarded[-1].path)  # nothing is saved of it
    assert last[:4] == ["addmm_2", "output 0", OUTSIDE, "tangents_1"]
    checked(graph, CheckProducts(), stage="joint")
    assert [u.site.name for u in analyse(graph).unguarded] == ["relu", "relu_1"]


def test_what_has_no_update_needs_no_guard():
    graph = traced(two_products, SQUARE, SQUARE, SQUARE)
    graph.output_node.meta["roles"] = (Role("output", "y"),)
    for node, _ in graph.inputs():
        node.meta["role"] = Role("input", node.name)
    found = analyse(graph)
    assert (found.sites, found.merges, found.unguarded) == (0, 0, ())
    assert found.completeness == 1.0 and found.holds(threshold=1.0)


@pytest.mark.parametrize("compression", [None, "int8"])
def test_payloads(compression):
    options = {"compression": compression} if compression else {}
    model, args = nn.Linear(32, 32), (torch.ones(4, 32),)

    def backward(guards, faults=""):
        given = options | ({"guards": guards} if guards else {})
        given |= {"faults": faults} if faults else {}
        return analyse(trace(model, args, given, world=2)[-1].after)

    bare = backward("")
    payloads = {site for site in sites(bare) if site[0] == "payload"}
    assert payloads
    for faults in ("", "bitflip{where=payload};stale{where=payload};bitflip{where=gradient}"):
        found = backward("payloads", faults)
        assert {u.phase for u in found.unguarded} == {"backward", "gradient"}
        assert found.sites == bare.sites and not found.unreachable
    assert len(found.unguarded) == len(bare.unguarded) - len(payloads)


def test_printed_and_as_json():
    found = analyse(guarded(two_products, SQUARE, SQUARE, SQUARE))
    assert str(found).splitlines() == [
        "control flow: 100.0% of 3 blocks reachable",
        "data dependencies: 100.0% of 2 merge points checked",
        "sites: 2 of 4 reach an update unguarded",
        "    backward: relu -> mm_1 -> gradient p0",
        "    gradient: mm_1 -> gradient p0",
    ]
    data = json.loads(found.json())
    assert data["completeness"] == 1.0
    assert data["unguarded"][0]["path"][0] == dataclasses.asdict(found.unguarded[0].site)


def test_model_lines():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight).sin()

    found = analyse(trace(Net(), (torch.ones(3),))[0].after)
    line = Net.forward.__code__.co_firstlineno + 1
    assert [u.site.model_line for u in found.unguarded] == [f"{__file__}:{line}"] * 2


# ---- against faults that happen


def test_faults_that_nobody_notices_were_said_to_be_unguarded():
    """One flip at each site, in the graphs that were looked at."""
    analysed = {}

    def watcher(name):
        def observe(previous, following, graph):
            if following is None:
                analysed[name.graph] = analyse(graph)

        return [observe]

    function, args = small()
    options = options_of("bitflip{bit=29}", ["forward", "backward", "gradient"], "products")
    with watching(watcher):
        trials = Trials(function, args, options)
    unguarded = {
        (u.phase, u.site.name) for name in ("joint", "backward") for u in analysed[name].unguarded
    }
    outcomes = {}
    for site in trials.sites:
        result = trials.run(Shot(site, site.faults[0], 0, (29,)))
        outcomes[site.phase, site.name] = result.outcome
    silent = {at for at, outcome in outcomes.items() if outcome == "silent"}
    detected = {at for at, outcome in outcomes.items() if outcome == "detected"}
    assert silent and silent <= unguarded
    assert detected and not detected & unguarded


def test_a_region_that_is_computed_again_has_the_same_ways():
    found = []
    for again in ((), (ReplayBackward(guards="products on=recompute region=[24]"),)):
        graph = capture(mlp(4, 5, 6, 3), torch.randn(3, 4)).backward
        checked(graph, CheckGradientProducts(), CheckSums(), CheckGradients(), *again)
        found.append(analyse(graph))
    without, within = found
    assert {"region_0", "region_1"} <= set(within.blocks) and within.connectivity == 1
    assert (within.sites, within.merges) == (without.sites, without.merges)
    assert within.completeness == without.completeness
    rows = [
        sorted((u.phase, u.site.operator, u.site.model_line) for u in each.unguarded)
        for each in found
    ]
    assert rows[0] == rows[1]
