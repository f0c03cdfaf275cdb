"""Whole steps, cut in two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpasses import spec
from fxpasses.observers import CheckRules
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.loss_scale import LossScaling
from tests.graphs import WORLD, mlp
from tests.steps import (
    clipped,
    cut,
    head,
    one,
    two,
    with_gradients,
)

aten = torch.ops.aten


def test_gradients_are_the_first_outputs_one_for_each_parameter():
    whole = cut(two, mlp(3, 4, 2))
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [(g.parameter, g.index) for g in head(whole).gradients()] == list(
        zip(names, range(4), strict=True)
    )
    assert not whole.before and whole.works_on_gradients == ""


def test_the_total_of_two_backwards_stands_where_the_second_one_makes_its_part():
    graph = head(cut(two, mlp(3, 4, 2)))
    order = {node.name: i for i, node in enumerate(graph.walk())}
    last = max(order[n.name] for n in graph.walk() if n.target is aten.mm.default)
    totals = {g.parameter: order[g.node.name] for g in graph.gradients()}
    assert totals["2.weight"] < last, "the first gradient could be sent while the rest is computed"
    assert all(g.node.target is aten.add.Tensor for g in graph.gradients())


def test_a_gradient_that_is_not_reduced_or_twice_breaks_a_rule(fake_world):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    graph = head(cut(one, mlp(3, 4, 2)))
    with pytest.raises(spec.SpecError, match="was reduced 0 times"):
        spec.check(graph, "test", (spec.reduced_once,))
    for _ in range(2):
        for current in (Bucketing(mb=1.0), sync):
            current.run(graph)
        for node in graph.walk():
            node.meta.pop("bucket", None)
    with pytest.raises(spec.SpecError, match="was reduced 2 times"):
        spec.check(graph, "test", (spec.reduced_once,))


def scales_in_between(model: nn.Module, x: torch.Tensor) -> None:
    one(model, x)
    model[0].weight.grad.mul_(0.5)
    one(model, x)


def writes_a_view_in_between(model: nn.Module, x: torch.Tensor) -> None:
    one(model, x)
    model[0].weight.grad.view(-1)[0] = 0
    one(model, x)


def drops_in_between(model: nn.Module, x: torch.Tensor) -> None:
    one(model, x)
    model.zero_grad()
    one(model, x)


@pytest.mark.parametrize("step", [scales_in_between, writes_a_view_in_between, drops_in_between])
def test_a_change_between_two_backwards_is_refused(step):
    with pytest.raises(ValueError, match=r"changes .grad of '0\.weight' between two backward"):
        cut(step, with_gradients(mlp(3, 2)))


def test_a_new_gradient_that_is_dropped_is_none():
    """Nothing but Dynamo knows of the first one, if no tensor held it before."""
    whole = cut(drops_in_between, mlp(3, 2))
    assert [len(mark.nodes) for mark in whole.marks] == [1, 1]


def test_a_loss_that_depends_on_a_reduced_gradient_is_refused():
    def step(model: nn.Module, x: torch.Tensor) -> None:
        one(model[0], x)
        (model[2](x) * model[0].weight.grad.sum()).sum().backward()

    layers = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"the gradient of '2\.\w+' depends on a .grad"):
        cut(step, layers)


def test_loss_scaling_says_that_it_finds_no_loss():
    graph = head(cut(one, mlp(3, 2)))
    with pytest.raises(ValueError, match="option 'loss_scale'"):
        LossScaling(scale=8.0).run(graph)


def test_the_same_function_is_cut_the_same_way():
    first, second = (head(cut(clipped, mlp(3, 4, 2))).fingerprint() for _ in range(2))
    assert first == second


def test_the_rules_hold_after_each_pass_of_a_joint_stage():
    graph = head(cut(one, mlp(3, 2)))
    CheckRules()(None, None, graph)
    assert [role.kind for _, _, role in graph.outputs()][:2] == ["gradient", "gradient"]
    assert not graph.inputs("tangent")
