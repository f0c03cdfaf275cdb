"""Variants of one backward: what each has as inputs and outputs, and what comes out over several ranks."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from fxpasses import spec
from fxpasses.config import Hardening
from fxpasses.distributed.plans import Form, Union
from fxpasses.facts import planned_collectives
from fxpasses.graph import (
    BUFFER_STATE,
    PENDING_STATE,
    Gradient,
    Role,
    StateSpec,
    TrainingGraph,
    empty_like,
)
from fxpasses.observers import CheckRules
from fxpasses.passes.base import Report
from fxpasses.pipeline import build
from fxpasses.rewrite import Provenance
from fxpasses.spec import SpecError
from fxpasses.variants import LEFT, LOCAL, SYNCHRONISE, TOTAL, Variant, pending_of, prepare
from tests.graphs import (
    WORLD,
    Ranks,
    TwoHeads,
    Zoo,
    backward_of,
    doubled,
    execute,
    mlp,
    nodes_with,
    random_inputs,
    traced,
)

CPU = torch.device("cpu")
aten = torch.ops.aten


def pending(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> StateSpec:
    return StateSpec(PENDING_STATE, name, shape, dtype, CPU)


def form(name: str, *shape: int) -> Form:
    return Form(name, shape, "float32")


def union_of(*names: str) -> Union:
    return Union(tuple(form(name, 3) for name in names), ())


def prepared(graph: TrainingGraph, variant: Variant) -> TrainingGraph:
    """A copy of the graph as this variant; the rules hold for it."""
    made = graph.copy()
    prepare(made, variant)
    spec.check(made, "prepare")
    return made


def states(graph: TrainingGraph) -> list[str]:
    return [role.name for _, role in graph.inputs("state")]


# What is added


def test_to_synchronise_and_locally_a_backward_runs_as_it_is():
    graph = backward_of(mlp(4, 3, 2), torch.randn(2, 4))
    for mode in (SYNCHRONISE, LOCAL):
        assert prepared(graph, Variant(mode)).fingerprint() == graph.fingerprint()


def test_the_total_has_an_input_for_what_waits_of_each_gradient():
    graph = prepared(doubled((2, 3), (4,)), Variant(TOTAL))
    assert states(graph) == ["pending/p0", "pending/p1"]
    specs = [node.meta["state"] for node, _ in graph.inputs("state")]
    assert specs == [pending("p0", 2, 3), pending("p1", 4)]
    assert [g.parameter for g in graph.gradients()] == ["p0", "p1"]
    assert len(nodes_with(graph, aten.add.Tensor)) == 2


def test_the_total_is_what_waits_plus_the_gradient():
    graph = prepared(doubled((3,), (3,)), Variant(TOTAL))
    x, y, p, q = (torch.full((3,), value) for value in (1.0, 2.0, 10.0, 20.0))
    first, second = execute(graph, [x, y, p, q])
    assert first.tolist() == [12.0] * 3 and second.tolist() == [24.0] * 3


def test_the_total_keeps_all_other_outputs():
    graph = backward_of(nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True))
    made = prepared(graph, Variant(TOTAL))
    inputs, count = random_inputs(graph), len(graph.gradients())
    before = execute(graph, inputs)
    waiting = [torch.zeros_like(before[g.index]) for g in graph.gradients()]
    after = execute(made, [*inputs, *waiting])
    assert len(after) == len(before) == count + 1
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert made.output_node.meta["roles"] == graph.output_node.meta["roles"]


def test_the_sum_stands_right_behind_its_gradient():
    """So that a bucket can be launched as early as without it."""
    graph = backward_of(mlp(4, 4, 4), torch.randn(2, 4))
    before = {g.parameter: g.node.name for g in graph.gradients()}
    made = prepared(graph, Variant(TOTAL))
    for gradient in made.gradients():
        assert gradient.node.args[0].name == before[gradient.parameter]
        between, node = [], gradient.node.args[0].next
        while node is not gradient.node:
            between.append(node)
            node = node.next
        assert all(n.meta["provenance"].rule == "total" for n in between)


def test_new_nodes_say_where_they_come_from():
    graph = prepared(doubled((3,)), Variant(TOTAL))
    (node,) = nodes_with(graph, aten.add.Tensor)
    assert node.meta["provenance"] == Provenance("accumulation", "total", "mul", "", ("p0",))


def test_an_empty_gradient_has_nothing_that_waits():
    graph = prepared(doubled((0, 3), (2,)), Variant(TOTAL))
    assert states(graph) == ["pending/p1"]


def test_a_gradient_that_is_none_has_nothing_that_waits():
    graph = doubled((3,), (3,))
    graph.output_node.args = ((None, graph.gradients()[1].node),)
    made = prepared(graph, Variant(TOTAL))
    assert states(made) == ["pending/p1"] and made.outputs()[0][1] is None


def test_one_node_that_is_the_gradient_of_two_parameters_has_two_totals():
    graph = prepared(traced(lambda x: [x * 2] * 2, torch.ones(3)), Variant(TOTAL))
    first, second = execute(graph, [torch.full((3,), value) for value in (1.0, 10.0, 20.0)])
    assert first.tolist() == [12.0] * 3 and second.tolist() == [22.0] * 3


def test_a_gradient_that_is_an_input_has_a_total():
    graph = prepared(traced(lambda x: (x,), torch.ones(3)), Variant(TOTAL))
    (total,) = execute(graph, [torch.full((3,), 1.0), torch.full((3,), 10.0)])
    assert total.tolist() == [11.0] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_what_waits_has_the_dtype_of_the_gradient(dtype):
    graph = prepared(doubled((3,), dtype=dtype), Variant(TOTAL))
    ((node, _),) = graph.inputs("state")
    assert node.meta["state"].dtype == node.meta["val"].dtype == dtype
    assert graph.gradients()[0].node.meta["val"].dtype == dtype


# Ranks whose graphs differ


def test_an_absent_parameter_is_a_gradient_output_behind_the_others():
    absent = (pending("elsewhere", 2), pending("nowhere", 3))
    variant = Variant(SYNCHRONISE, union_of("elsewhere", "p0", "nowhere"), absent)
    graph = prepared(doubled((3,)), variant)
    assert [g.parameter for g in graph.gradients()] == ["p0", "elsewhere", "nowhere"]
    assert graph.output_node.meta["roles"][1:] == (
        Role("gradient", "elsewhere"),
        Role("gradient", "nowhere"),
    )
    assert states(graph) == ["pending/elsewhere", "pending/nowhere"]
    own, first, second = execute(graph, [torch.ones(3), torch.full((2,), 7.0), torch.zeros(3)])
    assert own.tolist() == [2.0] * 3 and first.tolist() == [7.0] * 2 and not second.any()


def test_in_a_total_what_waits_of_an_absent_parameter_is_added_to_nothing():
    variant = Variant(TOTAL, union_of("p0", "absent"), (pending("absent", 3),))
    graph = prepared(doubled((3,)), variant)
    assert states(graph) == ["pending/p0", "pending/absent"]
    assert len(nodes_with(graph, aten.add.Tensor)) == 1


def test_the_buffers_of_a_union_are_the_ones_written():
    graph = doubled((3,))
    own = StateSpec(BUFFER_STATE, "own", (2,), torch.float32, CPU)
    other = dataclasses.replace(own, parameter="other")
    graph.module.meta["written_buffers"] = (own,)
    made = prepared(graph, Variant(union=union_of("p0"), buffers=(other, own)))
    assert made.written_buffers == (other, own)
    assert prepared(graph, Variant(union=union_of("p0"))).written_buffers == ()
    assert prepared(graph, Variant()).written_buffers == (own,)


def test_the_layout_is_the_agreed_order_of_parameters():
    union = Union((form("b", 2), form("a", 3)), (form("running_mean", 2),))
    assert Variant(union=union).layout == ("b", "a")
    assert Variant(union=Union((), ())).layout == ()
    for mode in (SYNCHRONISE, TOTAL, LOCAL):
        assert Variant(mode).layout is None


def test_equal_variants_are_one_key():
    variants = [
        Variant(),
        Variant(TOTAL),
        Variant(union=union_of("a")),
        Variant(union=union_of("b")),
        Variant(union=union_of("a"), absent=(pending("a", 3),)),
        Variant(union=union_of("a"), buffers=(pending("a", 3),)),
    ]
    assert len({*variants, *copy.deepcopy(variants)}) == 6


def test_what_waits_has_the_form_of_the_tensor():
    tensor = torch.ones(2, 3, dtype=torch.float64).t()
    assert pending_of("a.weight", tensor) == pending("a.weight", 3, 2, dtype=torch.float64)
    assert pending_of("a.weight", tensor).name == "pending/a.weight"


# Through the whole pipeline


def reduced(
    graph: TrainingGraph, variant: Variant, group: str, **options: object
) -> dict[str, Report]:
    """Prepare a variant and run the passes, with the rules checked after each; the reports."""
    prepare(graph, variant)
    pipeline = build(Hardening(**options), group, WORLD, 0).bind(layout=variant.layout)
    done = pipeline.run("backward", graph, [CheckRules()], local=variant.mode == LOCAL)
    graph.module.graph.lint()
    return {d.made_by.name: d.report for d in done}


def waits(graph: TrainingGraph, rank: int) -> list[torch.Tensor]:
    """A value of each state input: flags that are up; of what waits, other numbers on each rank."""
    found = []
    for index, (node, role) in enumerate(graph.inputs("state")):
        value = node.meta["val"]
        generator = torch.Generator().manual_seed(100 * rank + index)
        number = torch.randn(value.shape, generator=generator).to(value.dtype)
        found.append(number if role.name.startswith("pending/") else torch.ones(value.shape))
    return found


@pytest.mark.parametrize("bucket_mb", [1e-6, 25])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_ranks_receive_the_reduced_total(fake_world, bucket_mb, reduce):
    plain = backward_of(Zoo(), Zoo.example())
    graph = plain.copy()
    reports = reduced(graph, Variant(TOTAL), fake_world, bucket_mb=bucket_mb, reduce=reduce)
    inputs = [random_inputs(plain, seed=rank) for rank in range(WORLD)]
    pendings = [waits(graph, rank) for rank in range(WORLD)]
    ranks = Ranks(graph)
    found = ranks.run_all([[*x, *p] for x, p in zip(inputs, pendings, strict=True)])
    own = [execute(plain, x) for x in inputs]
    names = states(graph)
    for gradient in plain.gradients():
        if not gradient.node.meta["val"].numel():
            continue
        place = names.index(f"pending/{gradient.parameter}")
        exact = sum(
            g[gradient.index].double() + p[place].double()
            for g, p in zip(own, pendings, strict=True)
        ) / (WORLD if reduce == "mean" else 1)
        for outputs in found:
            torch.testing.assert_close(
                outputs[gradient.index].double(), exact, rtol=1e-5, atol=1e-6
            )
    sent = sum(payload.numel() * payload.element_size() for payload in ranks.payloads)
    values = [g.node.meta["val"] for g in plain.gradients()]
    assert sent == sum(v.numel() * v.element_size() for v in values)
    assert reports["gradient_sync"].counts["bytes"] == sent


def test_a_total_sends_as_much_as_a_gradient_alone(fake_world):
    reports = []
    for mode in (SYNCHRONISE, TOTAL):
        graph = backward_of(mlp(4, 4, 4), torch.randn(2, 4))
        reports.append(reduced(graph, Variant(mode), fake_world))
    assert reports[0] == reports[1]
    assert reports[0]["gradient_sync"] == Report(True, {"collectives": 1, "bytes": 4 * 40})


def test_where_nothing_waits_the_total_is_bitwise_the_gradient(fake_world):
    outputs = []
    for mode in (SYNCHRONISE, TOTAL):
        graph = backward_of(mlp(4, 4, 4), torch.randn(2, 4))
        reduced(graph, Variant(mode), fake_world)
        zeros = [torch.zeros(node.meta["val"].shape) for node, _ in graph.inputs("state")]
        inputs = [
            random_inputs(graph, rank)[: len(graph.inputs()) - len(zeros)] for rank in range(WORLD)
        ]
        outputs.append(Ranks(graph).run_all([[*x, *zeros] for x in inputs]))
    for without, with_zeros in zip(*outputs, strict=True):
        for a, b in zip(without, with_zeros, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_a_local_backward_sends_nothing(fake_world):
    graph = backward_of(TwoHeads(), torch.randn(4, 3))
    before = graph.fingerprint()
    assert reduced(graph, Variant(LOCAL), fake_world) == {}
    assert graph.fingerprint() == before


def test_what_waits_and_is_not_reduced_breaks_a_rule(fake_world):
    """A pass that adds it behind the reduction would reduce it on no rank."""
    graph = doubled((3,))
    reduced(graph, Variant(), fake_world)
    late = TrainingGraph(graph.module)
    prepare(late, Variant(TOTAL))
    with pytest.raises(SpecError, match="'p0' and was reduced 0 or 1 times"):
        spec.check(late, "late", (spec.reduced_once,))


HEADS = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 3), "b.bias": (2,)}


def heads(rank: int) -> tuple[TrainingGraph, Variant]:
    """Rank 0 uses both heads, rank 1 the second only; what the two agree on."""
    model = TwoHeads()
    program = model if rank == 0 else lambda x: model.b(x)
    graph = backward_of(program, torch.randn(4, 3))
    used = {g.parameter for g in graph.gradients()}
    assert used == (set(HEADS) if rank == 0 else {"b.weight", "b.bias"})
    union = Union(tuple(form(name, *shape) for name, shape in HEADS.items()), ())
    absent = tuple(pending(name, *shape) for name, shape in HEADS.items() if name not in used)
    return graph, Variant(SYNCHRONISE, union, absent)


@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
def test_ranks_with_different_graphs_send_the_same_in_the_same_order(fake_world, bucket_mb):
    sent = []
    for rank in (0, 1):
        graph, variant = heads(rank)
        reports = reduced(graph, variant, fake_world, bucket_mb=bucket_mb)
        assert reports["participation"].counts == {"flags": 4}
        assert reports["gradient_sync"].counts["bytes"] == 4 * 16
        sent.append([c.on_the_wire() for c in planned_collectives(graph)])
    assert sent[0] == sent[1]
    assert len(sent[0]) == 1 + (1 if bucket_mb == 25 else 4)


def test_absent_parameters_send_what_waits_and_receive_what_the_others_sent(fake_world):
    """Each rank is run alone: what its one bucket holds, divided by four, is what it gets back."""
    graph, variant = heads(rank=1)
    plain = copy.deepcopy(graph)
    reduced(graph, variant, fake_world)
    inputs, waiting = random_inputs(plain), [torch.full(s, 4.0) for s in ((2, 3), (2,))]
    alone = Ranks(graph, world=1)
    (outputs,) = alone.run_all([[*inputs, *waiting, torch.ones(4)]])
    own = {g.parameter: execute(plain, inputs)[g.index] for g in plain.gradients()}
    absent = {"a.weight": waiting[0], "a.bias": waiting[1]}
    _, payload = alone.payloads
    expected = torch.cat([(own | absent)[name].reshape(-1) for name in HEADS]) / WORLD
    assert torch.equal(payload, expected)
    for gradient in graph.gradients():
        value = (own | absent)[gradient.parameter] / WORLD
        assert torch.equal(outputs[gradient.index], value), gradient.parameter


# What micro-batches left


def left(*forms: Form) -> TrainingGraph:
    """A graph of nothing but what waits of these."""
    specs = tuple(pending(f.name, *f.shape) for f in forms)
    graph = TrainingGraph(empty_like(doubled((1,)).module))
    prepare(graph, Variant(LEFT, Union(forms, ()), specs))
    return graph


def test_an_empty_graph_takes_inputs_and_outputs_in_the_fake_mode_of_another():
    other = doubled((3,))
    graph = TrainingGraph(empty_like(other.module))
    assert graph.fake_mode is other.fake_mode
    assert graph.inputs() == graph.outputs() == [] and len(graph.graph.nodes) == 1
    node = graph.add_state(pending("w", 2))
    graph.add_output(node, Role("gradient", "w"))
    assert graph.gradients() == [Gradient("w", node, 0)]
    assert execute(graph, [torch.ones(2)])[0].tolist() == [1.0, 1.0]


def test_what_is_left_has_a_graph_without_computation():
    graph = left(form("a", 2, 3), form("b", 4))
    spec.check(graph, "prepare")
    assert list(graph.walk()) == []
    assert states(graph) == ["pending/a", "pending/b"]
    assert [g.parameter for g in graph.gradients()] == ["a", "b"]
    assert execute(graph, [torch.ones(2, 3), torch.zeros(4)])[0].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(("bucket_mb", "payloads"), [(25, 1), (1e-6, 2)])
@pytest.mark.parametrize(("reduce", "total"), [("mean", 2.5), ("sum", 10.0)])
def test_what_is_left_is_reduced_by_the_same_passes(fake_world, bucket_mb, payloads, reduce, total):
    forms = (form("a", 2, 3), form("b", 4))
    graph = left(*forms)
    variant = Variant(LEFT, Union(forms, ()))  # prepared above
    pipeline = build(Hardening(bucket_mb=bucket_mb, reduce=reduce), fake_world, WORLD, 0)
    done = pipeline.bind(layout=variant.layout).run("backward", graph, [CheckRules()])
    reports = {d.made_by.name: d.report for d in done}
    assert reports["gradient_sync"] == Report(True, {"collectives": payloads, "bytes": 4 * 10})
    waiting = [[torch.full(f.shape, rank + 1.0) for f in forms] for rank in range(WORLD)]
    ranks = Ranks(graph)
    for outputs in ranks.run_all([[*w, torch.ones(2)] for w in waiting]):
        assert outputs[0].tolist() == [[total] * 3] * 2 and outputs[1].tolist() == [total] * 4
    assert len(ranks.payloads) == 1 + payloads
