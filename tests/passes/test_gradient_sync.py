"""Gradient synchronisation: what is on the wire, when, and what comes out on each of four ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import Role, TrainingGraph
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucket, Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.precision import DTYPES
from fxpasses.schedule.order import is_heavy
from fxpasses.testing.world import World
from tests.graphs import (
    ANY_ORIGIN,
    C10D,
    WORLD,
    Ranks,
    Zoo,
    add_call,
    backward_of,
    checked,
    doubled,
    execute,
    mlp,
    nodes_with,
    random_inputs,
    reduced,
    traced,
)

aten = torch.ops.aten
EVERY_GRADIENT = 1e-9  # MiB: each gradient fills a bucket


def inputs_by_rank(graph: TrainingGraph, world: int = WORLD) -> list[list[torch.Tensor]]:
    return [random_inputs(graph, seed=rank) for rank in range(world)]


def launches_of(graph: TrainingGraph) -> list[fx.Node]:
    return [node for node in graph.walk() if is_launch(node)]


def waits_of(graph: TrainingGraph) -> list[fx.Node]:
    return [node for node in graph.walk() if is_wait(node)]


def deep_mlp(mb: float, group: str, **options) -> TrainingGraph:
    graph = backward_of(mlp(8, 8, 8, 8), torch.randn(2, 8))
    reduced(graph, group, mb, **options)
    return graph


# It acts


def test_each_bucket_is_reduced_by_one_collective(fake_world):
    graph = doubled((2, 3), (4,))
    report = reduced(graph, fake_world)
    assert report == Report(True, {"collectives": 1, "bytes": 40})
    (launch,) = launches_of(graph)
    assert launch.target is C10D.all_reduce.default and launch.args[1:] == ("sum", fake_world)
    assert len(waits_of(graph)) == 1


@pytest.mark.parametrize(("mb", "collectives"), [(1.0, 1), (EVERY_GRADIENT, 6)])
def test_collectives_are_as_many_as_buckets(fake_world, mb, collectives):
    graph = backward_of(mlp(8, 8, 8, 8), torch.randn(2, 8))
    report = reduced(graph, fake_world, mb)
    assert report.counts == {"collectives": collectives, "bytes": 3 * (64 + 8) * 4}
    assert len(launches_of(graph)) == len(waits_of(graph)) == collectives


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), ("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_the_dtype_on_the_wire(fake_world, dtype, size):
    graph = doubled((2, 3), (4,))
    assert reduced(graph, fake_world, dtype=dtype).counts["bytes"] == 10 * size
    (launch,) = launches_of(graph)
    assert launch.args[0].meta["val"].dtype == (DTYPES[dtype] if dtype else torch.float32)
    assert [g.node.meta["val"].dtype for g in graph.gradients()] == [torch.float32] * 2


def test_without_a_wire_dtype_each_gradient_keeps_its_own(fake_world):
    graph = traced(lambda a, b: (a * 2, b * 2), torch.ones(4), torch.ones(4, dtype=torch.bfloat16))
    assert reduced(graph, fake_world).counts == {"collectives": 2, "bytes": 4 * 4 + 4 * 2}
    assert nodes_with(graph, aten._to_copy.default) == []


def bucket_of(launch: fx.Node) -> Bucket:
    node = launch
    while "bucket" not in node.meta:
        node = node.args[0]
    return node.meta["bucket"]


def test_launches_say_what_they_carry(fake_world):
    graph = deep_mlp(1e-4, fake_world)
    for launch in launches_of(graph):
        bucket = bucket_of(launch)
        assert launch.meta["reduces"] is True
        assert launch.meta["provenance"].parameters == bucket.parameters
        assert launch.meta["provenance"].model_line == bucket.model_line != ""
        assert launch.args[0].meta["val"].numel() == sum(bucket.numels)


def test_the_sum_needs_no_scaling(fake_world):
    graph = doubled((3,))
    reduced(graph, fake_world, reduce="sum")
    assert nodes_with(graph, aten.div.Tensor) == []


def test_one_rank_needs_no_scaling(fake_world):
    graph = doubled((3,))
    assert reduced(graph, fake_world, world=1).counts["collectives"] == 1
    assert nodes_with(graph, aten.div.Tensor) == []


def test_empty_gradients_are_left_out(fake_world):
    graph = doubled((3,), (0, 2))
    assert reduced(graph, fake_world).counts == {"collectives": 1, "bytes": 12}


def test_gradients_of_inputs_are_not_reduced(fake_world):
    graph = backward_of(nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True))
    before = [node for _, node, _ in graph.outputs("input_gradient")]
    assert reduced(graph, fake_world).counts["bytes"] == (12 + 3) * 4
    assert [node for _, node, _ in graph.outputs("input_gradient")] == before


# In a fixed order


def summed(group: str, mb: float, order: str | None = "fixed", **options):
    """What all ranks get of gradients whose sum depends on its order, and half of these, by rank."""
    shapes = ((5,), (3, 2), (1,))
    graph = doubled(*shapes, dtype=options.pop("own", torch.float32))
    reduced(graph, group, mb, order=order, **options)
    rows = []
    for rank in range(WORLD):
        generator = torch.Generator().manual_seed(rank)
        rows.append([torch.randn(s, generator=generator) * 10.0 ** (2 * rank) for s in shapes])
    rows = [[x.to(graph.inputs()[0][0].meta["val"].dtype) for x in row] for row in rows]
    outputs = World([graph] * WORLD, rows).run()
    for row in outputs[1:]:
        assert all(map(torch.equal, row, outputs[0]))
    return list(outputs[0]), rows


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("mb", [1.0, 1e-9])
def test_a_fixed_order_is_that_of_the_ranks(fake_world, reduce, own, mb):
    found, rows = summed(fake_world, mb, reduce=reduce, own=own)
    scale = WORLD if reduce == "mean" else 1
    for gradient, column in zip(found, zip(*rows, strict=True), strict=True):
        assert torch.equal(gradient, functools.reduce(torch.add, [2 * x / scale for x in column]))


def test_a_narrow_wire_is_added_up_in_the_gradient_s_dtype(fake_world):
    found, rows = summed(fake_world, 1.0, dtype="bf16")
    for gradient, column in zip(found, zip(*rows, strict=True), strict=True):
        shares = [(2 * x / WORLD).bfloat16().float() for x in column]
        assert torch.equal(gradient, functools.reduce(torch.add, shares).bfloat16().float())


def test_a_fixed_order_takes_two_collectives(fake_world):
    graph = doubled((5,), (2,))
    report = reduced(graph, fake_world, order="fixed")
    assert report == Report(True, {"collectives": 2, "bytes": 4 * (8 + 2)})  # shards of 2
    targets = [n.target for n in launches_of(graph)]
    assert targets == [C10D.all_to_all_single.default, C10D.all_gather_into_tensor.default]
    graph = doubled((5,), (2,))
    assert reduced(graph, fake_world, order="fixed", world=2).counts["collectives"] == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_second_legs_stand_behind_the_next_first_one(fake_world, overlap):
    graph = doubled((5,), (2,), (3,))
    reduced(graph, fake_world, EVERY_GRADIENT, order="fixed", overlap=overlap)
    kinds = [
        "A" if n.target is C10D.all_to_all_single.default else "G" if is_launch(n) else "w"
        for n in graph.walk()
        if is_launch(n) or is_wait(n)
    ]
    assert "".join(kinds) == ("AAwGAwGwGwww" if overlap else "AwGwAwGwAwGw")


# It leaves alone


def test_a_graph_without_buckets_is_left_alone(fake_world):
    graph = doubled((0, 3))
    before = graph.fingerprint()
    report = reduced(graph, fake_world)
    assert report == Report(False, {"collectives": 0, "bytes": 0})
    assert graph.fingerprint() == before


# Positions


def test_a_launch_stands_right_behind_its_bucket(fake_world):
    graph = deep_mlp(1e-4, fake_world)
    flats = [node for node in graph.walk() if "bucket" in node.meta]
    assert len(flats) > 2
    for flat, launch in zip(flats, launches_of(graph), strict=True):
        node = flat
        while node is not launch:
            node = node.next
            assert node.meta["provenance"].rule == "launch"


def test_launches_stand_in_the_order_of_buckets(fake_world):
    graph = deep_mlp(EVERY_GRADIENT, fake_world)
    assert [bucket_of(n).index for n in launches_of(graph)] == list(range(6))


def test_products_of_earlier_layers_stand_behind_the_first_launch(fake_world):
    graph = deep_mlp(1e-4, fake_world)
    positions = graph.positions()
    behind = [
        sum(positions[n] > positions[launch] for n in graph.walk() if is_heavy(n))
        for launch in launches_of(graph)
    ]
    assert behind == sorted(behind, reverse=True)
    assert behind[0] >= 3 and behind[-1] == 0


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_with_overlap_waits_stand_behind_the_last_product(fake_world, dtype):
    graph = deep_mlp(1e-4, fake_world, dtype=dtype)
    positions = graph.positions()
    waits = waits_of(graph)
    last = max(positions[n] for n in graph.walk() if is_heavy(n) or is_launch(n))
    assert min(positions[wait] for wait in waits) > last
    assert [wait.args[0] for wait in waits] == launches_of(graph)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_without_overlap_each_wait_follows_its_launch(fake_world, dtype):
    graph = deep_mlp(1e-4, fake_world, overlap=False, dtype=dtype)
    launches = launches_of(graph)
    assert len(launches) > 2
    assert [launch.next for launch in launches] == waits_of(graph)
    assert [wait.args[0] for wait in waits_of(graph)] == launches


def test_launches_of_buckets_that_end_at_the_same_place_stand_in_order(fake_world):
    graph = traced(lambda x: [x * 2] * 2, torch.ones(3))
    reduced(graph, fake_world, EVERY_GRADIENT)
    assert [bucket_of(n).index for n in launches_of(graph)] == [0, 1]


# Numbers


def several_users(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gradient = x * 2
    return gradient, gradient.sum(), gradient.t() * 3


GRAPHS = {
    "mlp": lambda: backward_of(mlp(8, 8, 8), torch.randn(2, 8)),
    "zoo": lambda: backward_of(Zoo(), Zoo.example()),
    "several users": lambda: traced(several_users, torch.ones(3, 4)),
    "one node of two parameters": lambda: traced(lambda x: [x * 2] * 2, torch.ones(3)),
    "an input": lambda: traced(lambda x: (x, x.t()), torch.ones(3, 4)),
}


@pytest.mark.parametrize("case", GRAPHS)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("mb", [EVERY_GRADIENT, 1.0])
def test_each_rank_gets_the_reduced_gradient(fake_world, case, reduce, mb):
    graph = GRAPHS[case]()
    inputs = inputs_by_rank(graph)
    local = [execute(graph, each) for each in inputs]
    reduced(graph, fake_world, mb, reduce=reduce)
    results = Ranks(graph).run_all(inputs)
    for index in [g.index for g in graph.gradients()]:
        expected = torch.stack([out[index].double() for out in local]).sum(0)
        expected = expected / WORLD if reduce == "mean" else expected
        for result in results:
            assert result[index].dtype == local[0][index].dtype
            torch.testing.assert_close(result[index].double(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(result[index], results[0][index])


def test_exact_numbers_come_out_exact(fake_world):
    graph = doubled((3,), (2, 2))
    tangents = [
        [torch.full((3,), float(r + 1)), torch.full((2, 2), float(r))] for r in range(WORLD)
    ]
    reduced(graph, fake_world)
    for first, second in Ranks(graph).run_all(tangents):
        assert torch.equal(first, torch.full((3,), 5.0))
        assert torch.equal(second, torch.full((2, 2), 3.0))


def test_what_is_no_gradient_stays_local(fake_world):
    graph = doubled((3,))
    graph.add_output(graph.gradients()[0].node, Role("input_gradient", "x"))
    inputs = inputs_by_rank(graph)
    local = [execute(graph, each)[1] for each in inputs]
    reduced(graph, fake_world)
    for result, own in zip(Ranks(graph).run_all(inputs), local, strict=True):
        assert torch.equal(result[1], own)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_case_22_overlap_changes_no_bit(fake_world, dtype):
    results = []
    for overlap in (True, False):
        graph = backward_of(Zoo(), Zoo.example())
        reduced(graph, fake_world, 1e-4, overlap=overlap, dtype=dtype)
        results.append(Ranks(graph).run_all(inputs_by_rank(graph)))
    for with_overlap, without in zip(*results, strict=True):
        for a, b in zip(with_overlap, without, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_case_16_the_mean_does_not_overflow_in_half_precision(fake_world):
    graph = doubled((1,))
    reduced(graph, fake_world, dtype="fp16")
    for (gradient,) in Ranks(graph).run_all([[torch.tensor([20000.0])]] * WORLD):
        assert gradient.item() == 40000.0


def test_nan_and_inf_of_one_rank_reach_all(fake_world):
    graph = doubled((3,))
    reduced(graph, fake_world, dtype="bf16")
    odd = torch.tensor([float("nan"), float("inf"), 1.0])
    for (gradient,) in Ranks(graph).run_all([[odd]] + [[torch.ones(3)]] * (WORLD - 1)):
        assert gradient[0].isnan() and gradient[1] == float("inf") and gradient[2] == 2.0


def test_payloads_are_what_the_report_counts(fake_world):
    graph = backward_of(Zoo(), Zoo.example())
    report = reduced(graph, fake_world, 1e-4, dtype="bf16")
    ranks = Ranks(graph)
    ranks.run_all(inputs_by_rank(graph))
    assert len(ranks.payloads) == report.counts["collectives"]
    assert sum(p.numel() * p.element_size() for p in ranks.payloads) == report.counts["bytes"]
    assert {p.dtype for p in ranks.payloads} == {torch.bfloat16}


values = st.lists(st.floats(2**-3, 2**3, width=16), min_size=WORLD, max_size=WORLD)
signs = st.lists(st.sampled_from([-1.0, 1.0]), min_size=WORLD, max_size=WORLD)


def assert_within_bound(
    group: str, own: torch.dtype, wire: str | None, reduce: str, values
) -> None:
    """What `error_bound` says, for one gradient element a rank."""
    tangents = [torch.tensor([v], dtype=own) for v in values]
    graph = traced(lambda x: (x.neg(),), tangents[0])
    reduced(graph, group, dtype=wire, reduce=reduce)
    (out,) = Ranks(graph).run_all([[t] for t in tangents])[0]
    local = -torch.cat(tangents).double() / (WORLD if reduce == "mean" else 1)
    eps = torch.finfo(DTYPES[wire] if wire else own).eps
    bound = (WORLD + 1) * eps * local.abs().sum() + torch.finfo(own).eps * out.double().abs()
    assert (out.double() - local.sum()).abs() <= bound


bounded = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize(
    ("own", "wire"),
    [
        (torch.float32, None),
        (torch.float32, "bf16"),
        (torch.float32, "fp16"),
        (torch.float64, "fp32"),
        (torch.bfloat16, None),
    ],
)
@bounded
@given(values, signs)
def test_the_error_stays_within_the_stated_bound(fake_world, own, wire, reduce, values, signs):
    signed = [v * s for v, s in zip(values, signs, strict=True)]
    assert_within_bound(fake_world, own, wire, reduce, signed)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_bound_holds_with_a_wire_dtype_wider_than_the_gradients(fake_world, reduce):
    assert_within_bound(fake_world, torch.bfloat16, "fp32", reduce, [1.0, 1.0, 1.0, 2**-7])


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_a_complex_gradient_is_reduced_whole_or_refused(fake_world):
    graph = traced(lambda x: (x * 2,), torch.ones(3, dtype=torch.complex64))
    try:
        reduced(graph, fake_world, dtype="bf16")
    except ValueError:
        return
    for (gradient,) in Ranks(graph).run_all([[torch.full((3,), 1 + 1j)]] * WORLD):
        assert torch.equal(gradient, torch.full((3,), 2 + 2j))


# Beside other passes


def bucketed_with_reader() -> tuple[TrainingGraph, fx.Node]:
    """A graph with one bucket and a node, its second output, that reads it."""
    graph = doubled((3,))
    checked(graph, Bucketing(mb=1))
    flat = next(node for node in graph.walk() if "bucket" in node.meta)
    total = add_call(graph, aten.sum.default, flat)
    graph.add_output(total, Role("output", "total"))
    return graph, total


def sync(graph: TrainingGraph, group: str) -> None:
    GradientSync(group=group, world=WORLD, reduce="mean").run(graph)


def test_a_pass_in_between_may_read_a_bucket(fake_world):
    graph, total = bucketed_with_reader()
    total.meta["provenance"] = ANY_ORIGIN
    sync(graph, fake_world)
    tangents = [[torch.full((3,), float(rank))] for rank in range(WORLD)]
    for rank, (gradient, local) in enumerate(Ranks(graph).run_all(tangents)):
        assert gradient.tolist() == [3.0] * 3 and local.item() == rank * 2 * 3


def test_a_reader_without_provenance_does_no_harm(fake_world):
    graph, _ = bucketed_with_reader()
    sync(graph, fake_world)
    assert len(launches_of(graph)) == 1


# The contract


def test_the_contract():
    assert not GradientSync.preserves_numerics and "eps" in GradientSync().error_bound()
    environment = {"reduce": "sum", "reduce_dtype": "bf16", "group": "7", "world": 3, "rank": 1}
    bound = GradientSync(reduce="mean").bind(environment)
    assert bound == GradientSync("mean", "bf16", None, True, "7", 3)
    assert GradientSync(overlap=False).spec == "gradient_sync{overlap=false}"


@pytest.mark.parametrize(
    ("option", "value"), [("reduce", "max"), ("dtype", "fp64"), ("order", "some")]
)
def test_a_wrong_option_is_refused(option, value):
    with pytest.raises(ValueError, match=rf"gradient_sync\{{{option}={value}\}}; "):
        GradientSync(**{option: value})
