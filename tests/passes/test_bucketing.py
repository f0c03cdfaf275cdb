"""Bucketing: what goes where, where nodes stand, and not one bit of a gradient changed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucket, Bucketing, assign
from fxpasses.passes.gradient_sync import GradientSync
from tests.graphs import (
    C10D,
    WORLD,
    Zoo,
    add_call,
    backward_of,
    checked,
    doubled,
    execute,
    mlp,
    nodes_with,
    random_inputs,
    traced,
)

aten = torch.ops.aten
MIB = 2**20


def bucketed(
    graph: TrainingGraph, bucket_bytes: float = 2**30, layout: tuple[str, ...] | None = None
) -> Report:
    return checked(graph, Bucketing(mb=bucket_bytes / MIB, layout=layout))[0].report


def flats_of(graph: TrainingGraph) -> list[fx.Node]:
    return [node for node in graph.walk() if "bucket" in node.meta]


def contents(graph: TrainingGraph) -> list[tuple[str, ...]]:
    return [node.meta["bucket"].parameters for node in flats_of(graph)]


def assert_same(before: tuple, after: tuple) -> None:
    for old, new in zip(before, after, strict=True):
        if old is None:
            assert new is None
            continue
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert torch.equal(new, old)


def assert_keeps_numbers(graph: TrainingGraph, bucket_bytes: float = 2**30) -> Report:
    """Outputs are bitwise those from before, and dense gradients have the strides they had."""
    inputs = random_inputs(graph)
    before = execute(graph, inputs)
    report = bucketed(graph, bucket_bytes)
    after = execute(graph, inputs)
    assert_same(before, after)
    for gradient in graph.gradients():
        old, new = before[gradient.index], after[gradient.index]
        if is_dense(old):
            assert strides(new) == strides(old), gradient.parameter
    return report


def is_dense(value: torch.Tensor) -> bool:
    """Each element has one place in memory, and there is no gap."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    return value.permute(order).is_contiguous()


def strides(value: torch.Tensor) -> list[int]:
    """Those that mean something: of dimensions with more than one element."""
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]


# It acts


def test_gradients_become_views_of_one_flat_tensor():
    graph = doubled((2, 3), (4,))
    assert bucketed(graph) == Report(True, {"buckets": 1, "gradients": 2})
    (flat,) = flats_of(graph)
    assert flat.target is aten.cat.default and tuple(flat.meta["val"].shape) == (10,)
    assert flat.meta["bucket"] == Bucket(0, ("p0", "p1"), ((2, 3), (4,)), "")
    first, second = execute(graph, random_inputs(graph))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_new_nodes_say_where_they_come_from():
    graph = backward_of(mlp(4, 3), torch.randn(2, 4))
    bucketed(graph)
    origins = {n.meta["provenance"] for n in graph.walk() if "provenance" in n.meta}
    assert {o.rule for o in origins} == {"flatten", "unflatten"}
    assert {o.pass_name for o in origins} == {"bucketing"}
    assert all(set(o.parameters) == {"0.weight", "0.bias"} for o in origins)
    assert all(o.source and o.model_line for o in origins)


def test_a_bucket_closes_once_it_holds_its_size():
    graph = doubled(*[(4,)] * 5)
    assert bucketed(graph, 32).counts == {"buckets": 3, "gradients": 5}
    assert contents(graph) == [("p0", "p1"), ("p2", "p3"), ("p4",)]


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(16, 3), (16.5, 2), (17, 2), (33, 1)])
def test_the_size_is_reached_not_exceeded(bucket_bytes, buckets):
    graph = doubled(*[(4,)] * 3)
    assert bucketed(graph, bucket_bytes).counts["buckets"] == buckets


def test_a_large_gradient_fills_a_bucket_alone():
    graph = doubled((4,), (1000,), (4,))
    bucketed(graph, 16)
    assert contents(graph) == [("p0",), ("p1",), ("p2",)]


def test_buckets_fill_in_the_order_in_which_gradients_are_made():
    graph = backward_of(mlp(4, 3, 2), torch.randn(2, 4))
    bucketed(graph, 1)
    made = [name for (name,) in contents(graph)]
    assert made.index("2.weight") < made.index("0.weight")
    assert made.index("2.bias") < made.index("0.bias")


def test_one_dtype_a_bucket_whatever_the_order():
    graph = traced(
        lambda a, b, c, d: (a * 2, b * 2, c * 2, d * 2),
        *(torch.ones(4, dtype=d) for d in (torch.float32, torch.bfloat16) * 2),
    )
    assert bucketed(graph).counts == {"buckets": 2, "gradients": 4}
    assert contents(graph) == [("p0", "p2"), ("p1", "p3")]
    assert [flat.meta["val"].dtype for flat in flats_of(graph)] == [torch.float32, torch.bfloat16]


def test_the_index_of_a_bucket_is_its_place():
    graph = backward_of(Zoo(), Zoo.example())
    bucketed(graph, 1)
    assert [flat.meta["bucket"].index for flat in flats_of(graph)] == list(range(7))


# Positions


def test_a_bucket_stands_right_behind_its_last_gradient():
    graph = backward_of(mlp(4, 4, 4, 4), torch.randn(2, 4))
    made = graph.positions()
    last = [max((g.node for g in group), key=made.get) for group in assign(graph, 64)]
    bucketed(graph, 64)
    assert len(last) > 2
    for flat, node in zip(flats_of(graph), last, strict=True):
        between = _between(node, flat)
        assert all(n.meta["provenance"].rule == "flatten" for n in between)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    found, node = [], first.next
    while node is not last:
        assert node.op == "call_function", "the second node does not follow the first"
        found.append(node)
        node = node.next
    return found


def test_views_stand_at_the_end():
    graph = backward_of(mlp(4, 4, 4), torch.randn(2, 4))
    bucketed(graph, 64)
    rules = [getattr(n.meta.get("provenance"), "rule", "model") for n in graph.walk()]
    first = rules.index("unflatten")
    assert set(rules[first:]) == {"unflatten"} and "unflatten" not in rules[:first]


@pytest.mark.parametrize(
    "program",
    [lambda a, b: (a, b), lambda a, b: [a + b] * 2],
    ids=["two inputs", "one node of two parameters"],
)
def test_buckets_that_end_at_the_same_place_stand_in_order(program):
    graph = traced(program, torch.ones(3), torch.ones(3))
    bucketed(graph, 1)
    assert [flat.meta["bucket"].index for flat in flats_of(graph)] == [0, 1]


# It leaves alone


def unchanged(graph: TrainingGraph) -> Report:
    before = graph.fingerprint()
    report = bucketed(graph)
    assert graph.fingerprint() == before
    return report


def test_a_graph_without_parameter_gradients_is_left_alone():
    graph = backward_of(lambda x: x.sin(), torch.randn(3, requires_grad=True))
    assert graph.outputs("input_gradient")
    assert unchanged(graph) == Report(False, {"buckets": 0, "gradients": 0})


def test_a_graph_of_empty_gradients_is_left_alone():
    assert unchanged(doubled((0,), (0, 3))) == Report(False, {"buckets": 0, "gradients": 0})


def test_an_absent_gradient_stays_absent():
    graph = doubled((3,), (3,))
    graph.output_node.args = ((None, graph.gradients()[1].node),)
    bucketed(graph)
    assert contents(graph) == [("p1",)]
    assert execute(graph, random_inputs(graph))[0] is None


def test_an_empty_gradient_stays_out_of_the_bucket():
    graph = doubled((3,), (0, 3), (2,))
    empty = graph.gradients()[1].node
    assert bucketed(graph).counts["gradients"] == 2
    assert contents(graph) == [("p0", "p2")] and graph.gradients()[1].node is empty


def test_gradients_of_inputs_stay_out_of_the_buckets():
    graph = backward_of(nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True))
    before = [node for _, node, _ in graph.outputs("input_gradient")]
    assert bucketed(graph).counts["gradients"] == 2
    assert [node for _, node, _ in graph.outputs("input_gradient")] == before


# Numbers and layouts


LAYOUTS = {
    "contiguous": lambda x: x * 2,
    "transposed": lambda x: (x * 2).t(),
    "expanded": lambda x: (x * 2).sum().expand(3, 4),
    "expanded rows": lambda x: (x * 2).sum(0, keepdim=True).expand(3, 4),
    "every other column": lambda x: (x * 2)[:, ::2],
    "shifted": lambda x: (x * 2)[1:, 1:],
    "a row of size one": lambda x: (x * 2)[:1].t(),
    "0-dim": lambda x: (x * 2).sum(),
    "one element": lambda x: (x * 2).sum().reshape(1, 1, 1),
    "empty": lambda x: (x * 2)[:0],
    "an input": lambda x: x,
    "a view of an input": lambda x: x.t(),
    "a constant": lambda x: torch.ones(2, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_numbers_and_layout_are_kept(layout, dtype):
    graph = traced(lambda x: (LAYOUTS[layout](x), x * 3), torch.ones(3, 4, dtype=dtype))
    assert_keeps_numbers(graph)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**30])
def test_all_layouts_and_dtypes_in_one_graph(bucket_bytes):
    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [layout(z) for layout in LAYOUTS.values() for z in (x, y)]

    graph = traced(program, torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bfloat16))
    report = assert_keeps_numbers(graph, bucket_bytes)
    assert report.counts["gradients"] == 2 * (len(LAYOUTS) - 1)


@pytest.mark.parametrize("rank", [4, 5])
def test_channels_last_is_flattened_without_a_copy(rank):
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}[rank]
    example = torch.ones(2, 3, *[4] * (rank - 2)).to(memory_format=memory_format)
    graph = traced(lambda x: (x * 2,), example)
    value = graph.gradients()[0].node.meta["val"]
    assert value.is_contiguous(memory_format=memory_format) and not value.is_contiguous()
    assert_keeps_numbers(graph)
    assert nodes_with(graph, aten.clone.default) == []
    assert nodes_with(graph, aten._unsafe_view.default) == []


@pytest.mark.parametrize("permutation", [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_a_permuted_gradient_is_flattened_without_a_copy(permutation):
    graph = traced(lambda x: ((x * 2).permute(permutation),), torch.ones(2, 3, 4))
    assert_keeps_numbers(graph)
    assert nodes_with(graph, aten.clone.default) == []


@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**30])
def test_a_model_of_many_forms_keeps_its_gradients(bucket_bytes):
    graph = backward_of(Zoo(), Zoo.example())
    conv = next(g.node for g in graph.gradients() if g.parameter == "conv.weight")
    assert not conv.meta["val"].is_contiguous(), "the case holds no channels-last gradient"
    report = assert_keeps_numbers(graph, bucket_bytes)
    assert report.counts["gradients"] == 8 - 1 and report.counts["buckets"] >= 2


def test_other_users_of_a_gradient_keep_reading_it():
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient = x * 2
        return gradient, gradient.sum(), gradient.t() * 3

    graph = traced(program, torch.ones(3, 4))
    gradient = graph.gradients()[0].node
    users = set(gradient.users) - {graph.output_node}
    assert_keeps_numbers(graph, 1)
    assert users <= set(gradient.users) and graph.output_node not in gradient.users


def test_a_gradient_that_is_an_output_of_another_kind_as_well():
    graph = doubled((3,))
    gradient = graph.gradients()[0].node
    graph.add_output(gradient, graph.output_node.meta["roles"][0].__class__("input_gradient", "x"))
    assert_keeps_numbers(graph)
    assert graph.outputs("input_gradient")[0][1] is gradient


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_one_node_may_be_the_gradient_of_two_parameters(bucket_bytes):
    graph = traced(lambda x: [x * 2] * 2, torch.ones(3, 4))
    assert len({g.node for g in graph.gradients()}) == 1
    assert assert_keeps_numbers(graph, bucket_bytes).counts["gradients"] == 2
    assert len({g.node for g in graph.gradients()}) == 2


def test_a_tied_parameter_has_one_place():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(3, 3, bias=False) for _ in range(2))
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    graph = backward_of(Tied(), torch.randn(2, 3))
    bucketed(graph)
    assert contents(graph) == [("first.weight",)]


@st.composite
def gradients(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    return shape, order, dtype, draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(st.lists(gradients(), min_size=1, max_size=6), st.integers(1, 200))
def test_any_set_of_gradients_is_kept(forms, bucket_bytes):
    def program(*xs: torch.Tensor) -> list[torch.Tensor]:
        made = [(x * 2).permute(form[1]) for x, form in zip(xs, forms, strict=True)]
        return [
            x[..., :1].expand_as(x) if f[3] and x.dim() else x
            for x, f in zip(made, forms, strict=True)
        ]

    graph = traced(program, *(torch.ones(shape, dtype=dtype) for shape, _, dtype, _ in forms))
    numels = {g.parameter: g.node.meta["val"].numel() for g in graph.gradients()}
    assert_keeps_numbers(graph, bucket_bytes)
    assert_well_filled(flats_of(graph), numels, bucket_bytes)


def assert_well_filled(flats: list[fx.Node], numels: dict[str, int], bucket_bytes: int) -> None:
    """Each non-empty gradient is in one bucket; no bucket goes on after it is full."""
    placed = [name for flat in flats for name in flat.meta["bucket"].parameters]
    assert sorted(placed) == sorted(name for name, numel in numels.items() if numel)
    for flat in flats:
        bucket, value = flat.meta["bucket"], flat.meta["val"]
        assert bucket.numels == tuple(numels[name] for name in bucket.parameters)
        assert sum(bucket.numels) == value.numel()
        assert sum(bucket.numels[:-1]) * value.element_size() < bucket_bytes


# A layout that ranks agreed on, because their graphs differ


def placed(graph: TrainingGraph) -> tuple[int, ...]:
    """The indices of the buckets in the order in which they stand."""
    return tuple(flat.meta["bucket"].index for flat in flats_of(graph))


@pytest.mark.parametrize("layout", [("p2", "p0", "p1"), ("p1", "p2", "p0"), ("p0", "p1", "p2")])
def test_buckets_follow_the_layout_whatever_order_gradients_are_made_in(layout):
    graph = doubled((1,), (2,), (3,))
    assert bucketed(graph, 1, layout).counts == {"buckets": 3, "gradients": 3}
    assert contents(graph) == [(name,) for name in layout] and placed(graph) == (0, 1, 2)


def test_within_a_bucket_gradients_follow_the_layout():
    graph = doubled((1,), (2,), (3,))
    inputs = random_inputs(graph)
    before = execute(graph, inputs)
    bucketed(graph, layout=("p2", "p0", "p1"))
    (flat,) = flats_of(graph)
    assert flat.meta["bucket"] == Bucket(0, ("p2", "p0", "p1"), ((3,), (1,), (2,)), "")
    assert_same(before, execute(graph, inputs))


def test_what_the_layout_names_besides_is_no_part_of_a_bucket():
    """Empty gradients are in it as well, and none is sent of them."""
    graph = doubled((2,), (0, 3), (2,))
    layout = ("p1", "p2", "p0")
    assert bucketed(graph, layout=layout).counts == {"buckets": 1, "gradients": 2}
    assert contents(graph) == [("p2", "p0")]


def test_a_bucket_closes_by_the_layout():
    graph = doubled(*[(4,)] * 5)
    bucketed(graph, 32, ("p4", "p2", "p0", "p1", "p3"))
    assert contents(graph) == [("p4", "p2"), ("p0", "p1"), ("p3",)]


def test_buckets_of_several_dtypes_follow_the_layout_by_their_last_gradient():
    graph = traced(
        lambda a, b, c, d: (a * 2, b * 2, c * 2, d * 2),
        *(torch.ones(4, dtype=d) for d in (torch.float32, torch.bfloat16) * 2),
    )
    bucketed(graph, layout=("p3", "p0", "p2", "p1"))
    assert contents(graph) == [("p0", "p2"), ("p3", "p1")] and placed(graph) == (0, 1)


def test_no_bucket_stands_before_one_with_a_smaller_index():
    """Reversed, the first bucket is full last: all others wait for it."""
    graph = backward_of(mlp(4, 4, 4, 4), torch.randn(2, 4))
    made = sorted(graph.gradients(), key=lambda g: graph.positions()[g.node])
    layout = tuple(g.parameter for g in reversed(made))
    bucketed(graph, 1, layout)
    assert contents(graph) == [(name,) for name in layout]
    assert placed(graph) == tuple(range(6))


def test_buckets_stand_behind_all_else_where_graphs_differ():
    """What stands between them would be another thing on each rank."""
    graph = backward_of(mlp(4, 4, 4), torch.randn(2, 4))
    computed = list(graph.walk())[-1]
    bucketed(graph, 1, ("2.weight", "0.weight", "2.bias", "0.bias"))
    order = graph.positions()
    assert all(order[flat] > order[computed] for flat in flats_of(graph))


def test_launches_stand_in_the_order_of_the_buckets(fake_world):
    graph = backward_of(mlp(4, 4, 4, 4), torch.randn(2, 4))
    layout = tuple(sorted((g.parameter for g in graph.gradients()), reverse=True))
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    checked(graph, Bucketing(mb=1e-9, layout=layout), sync)
    launches = nodes_with(graph, C10D.all_reduce.default)
    carried = [launch.meta["provenance"].parameters for launch in launches]
    assert carried == [(name,) for name in layout]


@pytest.mark.parametrize("rank", [4, 5])
def test_with_a_layout_channels_last_is_flattened_in_logical_order(rank):
    """Another rank's gradient may lie in memory in another way."""
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}[rank]
    example = torch.ones(2, 3, *[4] * (rank - 2)).to(memory_format=memory_format)
    graph = traced(lambda x: (x * 2,), example)
    (tangent,) = random_inputs(graph)
    bucketed(graph, layout=("p0",))
    assert nodes_with(graph, aten.permute.default) == []
    (gradient,) = execute(graph, [tangent])
    assert torch.equal(gradient, tangent * 2) and gradient.is_contiguous()


def test_with_a_layout_a_transposed_gradient_is_flattened_in_logical_order():
    graph = traced(lambda x: ((x * 2).t(),), torch.ones(2, 3))
    before = len(nodes_with(graph, aten.permute.default) + nodes_with(graph, aten.t.default))
    bucketed(graph, layout=("p0",))
    (flat,) = flats_of(graph)
    after = len(nodes_with(graph, aten.permute.default) + nodes_with(graph, aten.t.default))
    assert after == before == 1
    x = torch.arange(6.0).view(2, 3)
    interpreter = fx.Interpreter(graph.module, garbage_collect_values=False)
    interpreter.run(x)
    assert interpreter.env[flat].tolist() == [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**30])
def test_with_a_layout_a_model_of_many_forms_keeps_its_gradients(bucket_bytes):
    graph = backward_of(Zoo(), Zoo.example())
    inputs = random_inputs(graph)
    before = execute(graph, inputs)
    layout = tuple(sorted(g.parameter for g in graph.gradients()))
    bucketed(graph, bucket_bytes, layout)
    assert_same(before, execute(graph, inputs))
    assert placed(graph) == tuple(range(len(flats_of(graph))))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_graphs_that_make_gradients_in_any_order_send_alike(data):
    """Two ranks: the same parameters, made in different orders, some at the start as inputs."""
    numels = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    layout = tuple(data.draw(st.permutations([f"p{i}" for i in range(len(numels))])))
    bucket_bytes = data.draw(st.integers(1, 60))
    sent = []
    for _ in range(2):
        order = data.draw(st.permutations(range(len(numels))))
        given_in = data.draw(st.sets(st.sampled_from(range(len(numels)))))
        sent.append(_sent(numels, layout, bucket_bytes, order, given_in))
    assert sent[0] == sent[1]


def _sent(
    numels: list[int],
    layout: tuple[str, ...],
    bucket_bytes: int,
    order: list[int],
    given_in: set[int],
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """What the buckets of a rank hold, in the order in which they stand."""

    def program(*xs: torch.Tensor) -> list[torch.Tensor]:
        made = {i: xs[i] if i in given_in else xs[i] * 2 for i in order}
        return [made[i] for i in range(len(xs))]

    graph = traced(program, *(torch.ones(numel) for numel in numels))
    bucketed(graph, bucket_bytes, layout)
    assert placed(graph) == tuple(range(len(flats_of(graph))))
    buckets = [flat.meta["bucket"] for flat in flats_of(graph)]
    return [(bucket.parameters, bucket.numels) for bucket in buckets]


# What it refuses


def test_a_sparse_gradient_is_refused_by_name():
    graph = doubled((3, 3))
    gradient = add_call(graph, aten.to_sparse.default, graph.gradients()[0].node)
    graph.set_output(0, gradient)
    with pytest.raises(ValueError, match=r"the gradient of 'p0' is torch.sparse_coo.*sparse=False"):
        Bucketing(mb=1).run(graph)


@pytest.mark.parametrize("mb", [0, -1, math.inf, -math.inf, math.nan])
def test_a_size_that_is_none_is_refused(mb):
    with pytest.raises(ValueError, match=r"bucketing\{mb=.*\}: expected a positive number"):
        Bucketing(mb=mb)


# The contract


def test_the_contract():
    assert Bucketing.preserves_numerics and Bucketing().error_bound() == "bitwise"
    assert Bucketing().bind({"bucket_mb": 7.0}) == Bucketing(mb=7.0)
    assert Bucketing(mb=2).bind({"bucket_mb": 7.0}) == Bucketing(mb=2)
    assert Bucketing().spec == "bucketing" and Bucketing(mb=0.5).spec == "bucketing{mb=0.5}"
    assert Bucketing(mb=1).bind({"layout": ("a",)}) == Bucketing(mb=1, layout=("a",))
    assert Bucketing(layout=("a",)).spec == "bucketing"
    assert not Bucketing.local
