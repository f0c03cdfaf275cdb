"""Participation: where it acts, and what the ranks learn."""

from __future__ import annotations

import pytest
import torch

from fxpasses.distributed.plans import Form, Union
from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import Role, StateSpec, TrainingGraph, empty_like, tangents_reaching
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.participation import STATE_KIND, Participation, flagged_outputs, tangent_sets
from fxpasses.variants import LEFT, Variant, pending_of, prepare
from tests.graphs import (
    C10D,
    WORLD,
    Ranks,
    TwoHeads,
    backward_of,
    checked,
    doubled,
    execute,
    mlp,
    random_inputs,
    traced,
)

STATE = f"{STATE_KIND}/"


def two_heads() -> TrainingGraph:
    return backward_of(TwoHeads(), torch.randn(4, 3))


def participated(graph: TrainingGraph, group: str) -> Report:
    return checked(graph, Participation(group=group))[0].report


def unchanged(graph: TrainingGraph, group: str) -> bool:
    before = graph.fingerprint()
    report = participated(graph, group)
    return report == Report(changed=False) and graph.fingerprint() == before


# It acts


def test_gradients_of_different_tangents_get_a_state_of_one_float_each(fake_world):
    graph = two_heads()
    assert participated(graph, fake_world) == Report(True, {"flags": 4})
    ((state, role),) = graph.inputs("state")
    assert role == Role("state", STATE)
    assert state.meta["state"] == StateSpec(
        STATE_KIND, "", (4,), torch.float32, torch.device("cpu")
    )
    ((_, written, _),) = graph.outputs("state")
    assert is_wait(written) and written.args[0].args == (state, "sum", fake_world)


def test_the_launch_is_the_first_node_and_the_wait_the_last(fake_world):
    graph = two_heads()
    participated(graph, fake_world)
    nodes = list(graph.walk())
    assert nodes[0].target is C10D.all_reduce.default
    assert nodes[-1].target is C10D.wait_tensor.default and nodes[-1].args == (nodes[0],)
    assert sum(is_launch(node) for node in nodes) == 1


def test_new_nodes_say_where_they_come_from(fake_world):
    graph = two_heads()
    participated(graph, fake_world)
    origins = [n.meta["provenance"] for n in graph.walk() if "provenance" in n.meta]
    assert [(o.pass_name, o.rule) for o in origins] == [
        ("participation", "launch"),
        ("participation", "finish"),
    ]


def test_it_is_no_reduction_of_gradients(fake_world):
    graph = two_heads()
    participated(graph, fake_world)
    assert all("reduces" not in node.meta for node in graph.walk())


def test_before_the_other_passes_its_collective_is_the_first(fake_world):
    graph = two_heads()
    checked(
        graph,
        Participation(group=fake_world),
        Bucketing(mb=1e-9),
        GradientSync(group=fake_world, world=WORLD, reduce="mean"),
    )
    launches = [node for node in graph.walk() if is_launch(node)]
    assert len(launches) == 5
    assert launches[0].args[0].meta["role"].kind == "state"


# It leaves alone


def test_gradients_of_one_tangent_are_left_alone(fake_world):
    assert unchanged(backward_of(mlp(3, 2), torch.randn(4, 3)), fake_world)


def test_gradients_that_share_all_tangents_are_left_alone(fake_world):
    graph = traced(lambda a, b: (a + b, a * b), torch.ones(3), torch.ones(3))
    assert unchanged(graph, fake_world)


def test_a_gradient_of_no_tangent_makes_no_set(fake_world):
    graph = traced(lambda a: (a * 2, torch.ones(3)), torch.ones(3))
    assert unchanged(graph, fake_world)


def test_gradients_of_inputs_count_too(fake_world):
    """A region before this one gets them as tangents: they must be there on all ranks or on none."""
    graph = traced(lambda a, b: (a * 2, b * 2), torch.ones(3), torch.ones(3))
    graph.output_node.meta["roles"] = (Role("gradient", "p0"), Role("input_gradient", "x"))
    assert not unchanged(graph, fake_world)


def test_a_graph_without_gradients_is_left_alone(fake_world):
    graph = backward_of(lambda x: (x.sin(), x.cos()), torch.randn(3, requires_grad=True))
    assert unchanged(graph, fake_world)


# A layout that ranks agreed on, because their graphs differ


def test_with_a_layout_there_is_a_flag_a_parameter(fake_world):
    graph = two_heads()
    layout = ("b.bias", "elsewhere", "a.weight", "a.bias", "b.weight")
    done = checked(graph, Participation(group=fake_world, layout=layout))
    assert done[0].report == Report(True, {"flags": 5})
    ((state, _),) = graph.inputs("state")
    assert state.meta["state"] == StateSpec(
        STATE_KIND, "", (5,), torch.float32, torch.device("cpu")
    )
    (launch,) = (node for node in graph.walk() if is_launch(node))
    assert launch.args == (state, "sum", fake_world) and tuple(launch.meta["val"].shape) == (5,)


@pytest.mark.parametrize("layout", [("0.weight", "0.bias"), ("0.weight",), ()])
def test_with_a_layout_a_graph_of_one_tangent_has_flags_too(fake_world, layout):
    """It can't know whether the graph of another rank has one as well."""
    graph = backward_of(mlp(3, 2), torch.randn(4, 3))
    done = checked(graph, Participation(group=fake_world, layout=layout))
    assert done[0].report == Report(True, {"flags": len(layout)})
    assert [tuple(n.meta["val"].shape) for n, _ in graph.inputs("state")] == [(len(layout),)]


def test_graphs_of_different_heads_have_the_same_flags(fake_world):
    model, layout = TwoHeads(), ("a.weight", "a.bias", "b.weight", "b.bias")
    payloads = []
    for program in (model, lambda x: model.a(x), lambda x: model.b(x)):
        graph = backward_of(program, torch.randn(4, 3))
        checked(graph, Participation(group=fake_world, layout=layout))
        ranks = Ranks(graph)
        flags = torch.tensor([1.0, 0.0, 1.0, 0.0])
        outputs = ranks.run_all([[*random_inputs(graph)[:-1], flags]] * WORLD)
        assert [out[-1].tolist() for out in outputs] == [[4.0, 0.0, 4.0, 0.0]] * WORLD
        payloads.append([tuple(payload.shape) for payload in ranks.payloads])
    assert payloads == [[(4,)]] * 3


def test_a_graph_of_nothing_but_what_waits_has_flags(fake_world):
    graph = TrainingGraph(empty_like(two_heads().module))
    forms = (Form("a", (2,), "float32"), Form("b", (3,), "float32"))
    specs = tuple(pending_of(f.name, torch.empty(f.shape)) for f in forms)
    prepare(graph, Variant(LEFT, Union(forms, ()), specs))
    done = checked(graph, Participation(group=fake_world, layout=("a", "b")))
    assert done[0].report == Report(True, {"flags": 2})


# Numbers


def test_each_gradient_has_the_tangents_that_it_depends_on():
    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return c * 2, a + c, a * 2, b * a * c, a * 3

    graph = traced(program, *[torch.ones(3)] * 3)
    reach = tangents_reaching(graph)
    assert flagged_outputs(graph, reach) == {0: {2}, 1: {0, 2}, 2: {0}, 3: {0, 1, 2}, 4: {0}}
    assert {tuple(sorted(s)) for s in tangent_sets(graph, reach)} == {(0,), (2,), (0, 2), (0, 1, 2)}


def test_gradients_stay_bitwise(fake_world):
    graph = two_heads()
    inputs = random_inputs(graph)
    before = execute(graph, inputs)
    participated(graph, fake_world)
    (after,) = Ranks(graph, world=1).run_all([[*inputs, torch.ones(4)]])
    for old, new in zip(before, after[: len(before)], strict=True):
        assert (old is None and new is None) or torch.equal(old, new)


def test_each_rank_learns_on_how_many_ranks_a_gradient_took_part(fake_world):
    graph = two_heads()
    participated(graph, fake_world)
    flags = [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0] * 4, [0.0, 0.0, 1.0, 0.0]]
    inputs = [[*random_inputs(graph)[:-1], torch.tensor(flag)] for flag in flags]
    for outputs in Ranks(graph).run_all(inputs):
        assert outputs[-1].tolist() == [3.0, 3.0, 2.0, 1.0]


# The contract


def test_the_contract():
    assert Participation.preserves_numerics and Participation.provides == {"participation"}
    assert Participation().bind({"group": "7"}) == Participation(group="7")
    assert Participation(group="7").spec == "participation"
    assert Participation().bind({"layout": ("a",)}) == Participation(layout=("a",))
    assert Participation(layout=("a",)).spec == "participation"
    assert not Participation.local


def test_behind_buckets_it_is_refused(fake_world):
    graph = doubled((2,), (3,))
    checked(graph, Bucketing(mb=1))
    with pytest.raises(ValueError, match="put it in front of 'bucketing'"):
        Participation(group=fake_world).run(graph)
