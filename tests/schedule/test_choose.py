"""Sizes of buckets and schemes, chosen by what a step would take."""

from __future__ import annotations

import torch
from torch import nn

from fxpasses.effects import is_launch
from fxpasses.schedule.build import build
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.tasks import in_order, queued
from fxpasses.trace import trace
from tests.graphs import mlp

# Computing and coding take seconds, so that what is chosen depends on the link alone.
BASE = {"flops": 1e6, "memory": 1e12, "operator_s": 0.0, "latency": 0.0, "collective_s": 0.0}
# A link that hides what is sent as it is, and slow codecs.
CODING = {"bandwidth": 3e5, "encode_s": {"int8": 1e-6}, "decode_s": {"int8": 1e-6}}


def planned(machine: dict, schedule: str = "auto", compression: str = "none", world: int = 2):
    model = mlp(*[32] * 9)
    options = {
        "bucket_mb": 0.016,
        "compression": compression,
        "schedule": schedule,
        "machine": {**BASE, **machine},
    }
    graph = trace(lambda x: model(x).sum(), (torch.ones(64, 32),), options, world=world)[-1].after
    program = build(graph, Machine.parse(options["machine"]), world)
    launches = [w for w in program.works if w.kind == "link"]
    return launches, queued(program.tasks, in_order(program.tasks)).makespan


def test_a_slow_link_gets_small_buckets_and_a_late_one_large():
    slow_link = {"bandwidth": 1e5}
    fixed, fixed_s = planned(slow_link, "fixed")
    small, small_s = planned(slow_link)
    assert len(small) > len(fixed) and small_s < fixed_s
    slow_start = {"bandwidth": 1e9, "latency": 0.5}
    fixed, fixed_s = planned(slow_start, "fixed")
    large, large_s = planned(slow_start)
    assert len(large) < len(fixed) and large_s < fixed_s


def test_what_the_link_hides_is_not_compressed():
    fixed, fixed_s = planned(CODING, "fixed", "int8")
    chosen, chosen_s = planned(CODING, "auto", "int8")
    assert {w.cost.kind for w in fixed} == {"all_gather_into_tensor"}
    assert {w.cost.kind for w in chosen} >= {"all_reduce"}
    assert chosen_s < fixed_s


def test_nothing_is_compressed_that_the_options_do_not_compress():
    launches, _ = planned({"bandwidth": 1e3}, "auto", "none")
    assert {w.cost.kind for w in launches} == {"all_reduce"}


def test_without_a_choice_the_passes_are_those_of_the_options():
    for schedule in ("fixed", "serial"):
        launches, _ = planned({"bandwidth": 1e5}, schedule)
        assert len(launches) == 3 or len(launches) == 2


def test_names_may_hold_what_options_are_split_at():
    model = nn.ModuleDict({key: nn.Linear(32, 32) for key in ("a:b", "x=1", "y;z", "[0]", "*")})
    options = {
        "bucket_mb": 0.016,
        "compression": "int8",
        "schedule": "auto",
        "machine": {**BASE, **CODING},
    }

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in model.values():
            x = layer(x).relu()
        return x.sum()

    graph = trace(program, (torch.ones(64, 32),), options, world=2)[-1].after
    assert "all_reduce" in {n.target._opname for n in graph.walk() if is_launch(n)}
