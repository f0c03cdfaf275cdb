"""Costs: counted by hand for single nodes, and the same in numbers and in symbols."""

from __future__ import annotations

import pytest
import sympy
import torch

from fxpasses.schedule.cost import (
    SYMBOLS,
    WORLD,
    Cost,
    Transfer,
    closed_form,
    fused,
    seconds,
    single,
    sizes_of,
    transfer,
)
from fxpasses.schedule.machine import Machine
from fxpasses.trace import trace
from tests.graphs import traced

MACHINE = Machine(
    flops=1e9, memory=1e9, operator_s=0.0, bandwidth=1e6, latency=1e-3, collective_s=0.0
)


def calls(fn, *examples):
    return list(traced(fn, *examples).walk())


def test_a_product_is_counted_by_its_operations_and_its_bytes():
    (node,) = calls(lambda a, b: [a @ b], torch.ones(4, 5), torch.ones(5, 6))
    assert single(node) == Cost(flops=2 * 4 * 5 * 6, bytes=4 * (20 + 30 + 24), operators=1)


def test_low_precision_has_a_rate_of_its_own():
    a, b = torch.ones(4, 5).bfloat16(), torch.ones(5, 6).bfloat16()
    (node,) = calls(lambda a, b: [a @ b], a, b)
    assert (single(node).flops, single(node).flops_16) == (0, 240)


def test_a_fused_loop_reads_what_comes_in_and_writes_what_goes_out():
    nodes = calls(lambda a, b: [(a * b + a).exp()], torch.ones(100), torch.ones(100))
    assert len(nodes) == 3
    assert fused(nodes) == Cost(bytes=3 * 400, operators=1)


def test_a_view_costs_nothing_and_is_read_as_what_it_shows():
    nodes = calls(lambda a: [a.expand(50, 100) * 2], torch.ones(1, 100))
    assert fused(nodes) == Cost(bytes=400 + 50 * 400, operators=1)
    assert fused(nodes[:1]) == Cost()


def test_attention_for_the_cpu_is_counted_forward_and_backward():
    q = torch.ones(2, 4, 16, 8, requires_grad=True)
    graphs = trace(
        lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum(),
        (q,),
    )
    joint = next(g for g in graphs if g.name.graph == "joint").after
    flops = [single(n).flops for n in joint.walk() if "attention" in str(n.target)]
    forward = 2 * 2 * 2 * 4 * 16 * 16 * 8
    assert flops == [forward, 5 * forward // 2]


@pytest.mark.parametrize(
    ("kind", "world", "expected"),
    [
        ("all_reduce", 4, 2 * 3 / 4 * 1.0 + 6e-3),
        ("all_reduce_", 2, 1.0 + 2e-3),
        ("all_gather_into_tensor", 4, 3.0 + 3e-3),
        ("all_to_all_single", 4, 0.75 + 3e-3),
        ("reduce_scatter_tensor", 2, 0.5 + 1e-3),
        ("broadcast", 8, 3.0 + 3e-3),
    ],
)
def test_collectives_by_algorithm(kind, world, expected):
    assert seconds(Transfer(kind, 10**6), MACHINE, world) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scheme", "world", "encoded", "decoded"),
    [
        # One leg: two payloads are decoded. Two: four pieces of a quarter, then the mean.
        ("int4", 2, [("int4", 4096)], [("int4", 2 * 4096)]),
        ("int8", 4, [("int8", 4096), ("int8", 1024)], [("int8", 4096), ("int8", 4096)]),
        ("int4", 4, [("int4", 4096), ("int8", 1024)], [("int4", 4096), ("int8", 4096)]),
        ("bf16", 2, [("bf16", 4096)], [("bf16", 2 * 4096)]),
        ("fp16", 4, [("fp16", 4096), ("fp16", 1024)], [("fp16", 4096), ("fp16", 4096)]),
        ("topk", 2, [("topk", 4096)], [("topk", 4096)]),
    ],
)
def test_codecs_are_counted_by_elements(scheme, world, encoded, decoded):
    model = torch.nn.Linear(64, 64, bias=False)
    graphs = trace(
        lambda x: model(x).sum(), (torch.ones(2, 64),), {"compression": scheme}, world=world
    )
    nodes = [n for n in graphs[-1].after.walk() if str(n.target).startswith("fxpasses.")]
    costs = [single(node) for node in nodes]
    assert [c for cost in costs for c in cost.encoded] == encoded
    assert [c for cost in costs for c in cost.decoded] == decoded


def test_what_is_sent_is_read_off_the_payload():
    model = torch.nn.Linear(64, 64, bias=False)
    graph = trace(lambda x: model(x).sum(), (torch.ones(2, 64),), world=4)[-1].after
    (launch,) = [n for n in graph.walk() if "all_reduce" in str(n.target)]
    assert transfer(launch) == Transfer("all_reduce", 4 * 4096)


def test_numbers_are_what_the_closed_form_says():
    costs = [
        Cost(flops=10**9, bytes=10**6, operators=2),
        Cost(flops=10**3, bytes=10**6, encoded=(("int4", 1000),), decoded=(("topk", 10),)),
        Cost(launches=2, sent=Transfer("all_reduce", 10**6)),
        Transfer("all_reduce", 10**6),
        Transfer("all_gather_into_tensor", 10**5),
        Transfer("broadcast", 10**2),
    ]
    machine, world = Machine(host_s=1e-9), 8
    form = closed_form(costs)
    values = {WORLD: world}
    for name in (
        "flops",
        "flops_16",
        "memory",
        "operator_s",
        "bandwidth",
        "latency",
        "collective_s",
        "host_s",
    ):
        values[getattr(SYMBOLS, name)] = getattr(machine, name)
    for rates in ("encode_s", "decode_s"):
        for scheme, symbol in getattr(SYMBOLS, rates).items():
            values[symbol] = getattr(machine, rates)[scheme]
    expected = sum(seconds(cost, machine, world) for cost in costs)
    assert float(form.subs(values)) == pytest.approx(expected)


def test_a_closed_form_is_short():
    twice = closed_form(
        [Transfer("all_gather_into_tensor", 100), Transfer("all_gather_into_tensor", 23)]
    )
    bandwidth, latency = SYMBOLS.bandwidth, SYMBOLS.latency
    assert (
        twice == 123 * (WORLD - 1) / bandwidth + 2 * latency * (WORLD - 1)
        or sympy.simplify(twice - 123 * (WORLD - 1) / bandwidth - 2 * latency * (WORLD - 1)) == 0
    )
    assert str(twice) == "2*latency*(W - 1) + 123*(W - 1)/bandwidth"


def test_symbolic_sizes_stay_symbols():
    model = torch.nn.Linear(8, 8)
    x = torch.ones(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    graph = trace(lambda x: model(x).relu().sum(), (x,))[-1].after
    costs = [single(n) for n in graph.walk() if "mm" in str(n.target)]
    sizes = sizes_of(graph.graph)
    (size,) = costs[0].flops.free_symbols
    assert sizes[size] == 6
    assert costs[0].flops == 2 * 8 * 8 * size
    assert seconds(costs[0], MACHINE, 1, sizes) == pytest.approx(2 * 8 * 8 * 6 / 1e9)
