"""Whole steps, put together again."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxpasses import spec
from fxpasses.effects import is_launch
from fxpasses.graph import TrainingGraph, copied
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.running_stats import RunningStats
from fxpasses.tail import prepare
from fxpasses.variants import TOTAL, Variant
from fxpasses.whole_step import split
from tests.graphs import C10D, WORLD, checked, mlp, nodes_with
from tests.steps import (
    X,
    ancestors,
    clipped,
    close,
    cut,
    expected,
    head,
    joined,
    one,
    reads_in_between,
    results,
    traced_step,
    twin_of,
    two,
    with_gradients,
)

aten = torch.ops.aten


@pytest.mark.parametrize("step", [one, two, clipped, reads_in_between])
@pytest.mark.parametrize("make", [lambda: mlp(3, 4, 2), lambda: with_gradients(mlp(3, 4, 2))])
def test_cut_and_joined_it_computes_what_the_function_does(step, make):
    model = make()
    spec.check(head(cut(step, model)), "split")
    outputs, held = results(step, model)
    value, gradients = expected(step, model)
    if held[0] is None:  # what becomes `.grad` is an output
        assert close(outputs[-4:], gradients)
    else:
        assert close(held, gradients)
    if value is not None:
        assert torch.allclose(value, outputs[0])


def test_each_parameter_is_reduced_once(fake_world):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    graph = joined(cut(two, with_gradients(mlp(3, 4, 2))), Bucketing(mb=1.0), sync)
    (launch,) = nodes_with(graph, C10D.all_reduce.default)
    assert launch.meta["val"].numel() == 3 * 4 + 4 + 4 * 2 + 2


def test_what_reads_in_between_reads_a_local_value(fake_world):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    graph = joined(cut(reads_in_between, mlp(3, 4, 2)), Bucketing(mb=1.0), sync)
    norm = graph.outputs()[0][1]
    assert not any("wait" in name for name in ancestors(norm))


def test_what_reads_behind_it_reads_the_reduced_value(fake_world):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    whole = cut(clipped, mlp(3, 4, 2))
    assert "clip_grad.py:" in whole.works_on_gradients
    norm = joined(whole, Bucketing(mb=1.0), sync).outputs()[0][1]
    assert any("wait" in name for name in ancestors(norm))


def test_a_new_gradient_is_the_view_of_its_bucket(fake_world):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    graph = joined(cut(one, mlp(3, 4, 2)), Bucketing(mb=1.0), sync)
    gradients = [node for _, node, _ in graph.outputs()][1:]
    assert {n.target for n in gradients} == {aten.view.default}
    assert not nodes_with(graph, aten.copy.default)


class Shared(nn.Module):
    """Two parameters with one gradient, and one whose gradient is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
        self.c = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a + self.b) * x + self.c


def test_gradients_that_no_pass_touched_are_tensors_of_their_own():
    def step(model: nn.Module, x: torch.Tensor) -> None:
        model(x).sum().backward()

    (a, b, c), _ = results(step, Shared())
    assert a is not b and a.data_ptr() != b.data_ptr()
    assert torch.equal(a, X) and torch.equal(b, X)
    c.add_(1)  # not expanded
    assert torch.equal(c, torch.full((2, 3), 2.0))


def test_clearing_in_place_begins_anew():
    def step(model: nn.Module, x: torch.Tensor) -> None:
        one(model, x)
        model.zero_grad(set_to_none=False)
        one(model, x * 2)

    model = with_gradients(mlp(3, 2))
    assert close(results(step, model)[1], expected(step, model)[1])


def test_what_reads_in_front_of_clearing_reads_a_local_value():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        one(model, x)
        norm = model[0].weight.grad.norm()
        model.zero_grad(set_to_none=False)
        one(model, x * 2)
        return norm

    model = with_gradients(mlp(3, 2))
    outputs, held = results(step, model)
    value, gradients = expected(step, model)
    assert torch.allclose(outputs[0], value) and close(held, gradients)


@pytest.mark.parametrize("waits", [True, False])
def test_pending_gradients_are_chosen_by_an_input(fake_world, waits):
    model = with_gradients(mlp(3, 2))
    traced = traced_step(one, twin_of(model), X)
    whole = split(traced.module)
    graph = TrainingGraph(copied(whole.head))
    prepare(whole, graph, Variant(TOTAL))
    total, _, rest, _ = list(
        fx.Interpreter(graph.module).run(*traced.inputs, *[torch.tensor(waits)] * 2)
    )[:4]
    gradient = expected(one, model)[1][0]  # what was there, and what is new
    assert torch.allclose(total, gradient if waits else gradient - 1)
    assert torch.equal(rest, torch.zeros(2, 3) if waits else torch.ones(2, 3))

    states = [node.meta["state"].name for node, _ in graph.inputs("state")]
    assert states == ["waits/0.weight", "waits/0.bias"]
    sync = GradientSync(group=fake_world, world=WORLD, reduce="sum")
    checked(graph, Bucketing(mb=1.0), sync)  # the rule `reduced_once` holds


def test_running_statistics_are_broadcast_behind_all_gradients(fake_world):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    whole = cut(two, model)
    names = [role.name for _, _, role in head(whole).outputs("mutation")]
    assert names == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    passes = (
        RunningStats(group=fake_world),
        Bucketing(mb=1.0),
        GradientSync(group=fake_world, world=WORLD, reduce="mean"),
    )
    graph = joined(whole, *passes)
    assert not graph.inputs("state")
    launches = [node.target for node in graph.walk() if is_launch(node)]
    assert launches == [C10D.all_reduce.default, C10D.broadcast.default]
    written = {
        str(n.args[0].meta["role"].name): ancestors(n.args[1])
        for n in nodes_with(graph, aten.copy_.default)
    }
    (broadcast,) = nodes_with(graph, C10D.broadcast.default)
    assert broadcast.name in written["1.running_mean"]
    assert broadcast.name not in written["1.num_batches_tracked"]


def test_a_buffer_that_holds_something_of_a_gradient_is_written_behind_it():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("norm", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.norm

    def step(model: nn.Module, x: torch.Tensor) -> None:
        model.layer(x).sum().backward()
        model.norm.copy_(model.layer.weight.grad.norm())

    whole = cut(step, Net())
    assert not head(whole).written_buffers
    (write,) = nodes_with(joined(whole), aten.copy_.default)
    assert write.args[0].meta["role"].name == "norm"


def test_constants_of_the_function_stay():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        one(model, x * torch.tensor([1.0, 2.0, 3.0]))
        return model[0].bias.grad * torch.tensor([3.0, 4.0])

    model = mlp(3, 2)
    assert torch.allclose(results(step, model)[0][0], expected(step, model)[0])
