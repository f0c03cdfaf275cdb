"""Markers in Dynamo's graph, where backward() adds to `.grad`."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxpasses.marking import MARKER, calls_backward, is_marked
from tests.steps import marked


def markers(gm: fx.GraphModule) -> list[tuple[str, str]]:
    """(what is added to, parameter) of each marker."""
    nodes = gm.graph.find_nodes(op="call_function", target=MARKER)
    return [("" if n.args[1] is None else n.args[1].op, n.args[2]) for n in nodes]


def layer() -> nn.Linear:
    return nn.Linear(2, 2)


def test_a_first_gradient_and_one_that_is_added():
    model = layer()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        model(x).square().sum().backward()

    _, graph = marked(step, torch.ones(1, 2))
    names = ["weight", "bias"]
    new = "call_function"  # the tensor that became `.grad`
    assert markers(graph) == [("", n) for n in names] + [(new, n) for n in names]


def test_a_gradient_that_is_there_already_is_added_to():
    model = layer()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    _, graph = marked(step, torch.ones(1, 2))
    assert markers(graph) == [("placeholder", "weight"), ("placeholder", "bias")]


def test_unused_frozen_and_other_tensors_have_no_marker():
    used, unused, frozen = layer(), layer(), layer()
    frozen.requires_grad_(False)

    def step(x: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        y = unused(x)
        frozen(used(x + free)).sum().backward()
        return y.detach()

    free = torch.ones(1, 2, requires_grad=True)
    _, graph = marked(step, torch.ones(1, 2), free)
    assert [name for _, name in markers(graph)] == ["used.weight", "used.bias"]


def test_what_the_program_adds_itself_is_no_marker():
    model, average = layer(), torch.zeros(2, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x).sum().backward(inputs=[model.weight])
        with torch.no_grad():
            average.add_(model.weight.grad)
            model.weight.grad.add_(model.weight)
        return average + 1

    _, graph = marked(step, torch.ones(1, 2))
    assert markers(graph) == [("", "weight")]


def test_dynamos_own_graph_stays_as_it_was():
    model = layer()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    before, after = marked(step, torch.ones(1, 2))
    assert calls_backward(before) and not is_marked(before)
    assert is_marked(after)
    old, new = (g.graph.find_nodes(op="placeholder") for g in (before, after))
    assert [n._dynamo_source for n in old] == [n._dynamo_source for n in new]
    before.graph.lint()
    after.graph.lint()


def test_a_marked_graph_computes_the_same():
    model, x = layer(), torch.randn(3, 2)

    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()
        model(x).sum().backward()

    before, after = marked(step, x)
    inputs = [p.detach().clone().requires_grad_() for p in model.parameters()]
    # Dynamo's graphs take what the code reads, in the order in which it first does.
    for old, new in zip(before(*inputs, x), after(*inputs, x), strict=True):
        assert torch.allclose(old, new)


def takes_the_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model(x).sum(), model.weight)[0]


def keeps_the_gradient(model: nn.Module, x: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(model(x).sum(), model.weight)
    model.weight.grad = gradient


def differentiates_again(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward(create_graph=True)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (takes_the_gradient, r"calls torch.autograd.grad\(\).*the gradient of 'weight'"),
        (keeps_the_gradient, r"calls torch.autograd.grad\(\).*the gradient of 'weight'"),
        (differentiates_again, "create_graph=True"),
    ],
)
def test_gradients_of_parameters_that_go_elsewhere_are_refused(step, message):
    with pytest.raises(Exception, match=message) as caught:
        marked(step, layer(), torch.ones(1, 2))
    assert "ValueError" in repr(caught.value)


def test_gradients_of_other_tensors_may_go_anywhere():
    model = layer()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x).sum(), x)[0]

    _, graph = marked(step, torch.ones(1, 2, requires_grad=True))
    assert not is_marked(graph)
