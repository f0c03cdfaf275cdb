"""Names of inputs, and errors that reach the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxpasses.dynamo import (
    VisibleValueError,
    describe_inputs,
    input_roles,
    own_settings,
    user_errors_visible,
)
from fxpasses.graph import Role
from tests.graphs import TwoHeads, mlp


def roles_of(program: Callable[..., Any], *args: Any) -> list[Role]:
    """The roles of the inputs of the one graph that Dynamo makes of a program."""
    found: list[list[Role]] = []

    def backend(gm, example_inputs):
        found.append(describe_inputs(gm, example_inputs)[1])
        return gm.forward

    torch.compile(program, backend=backend, fullgraph=True)(*args)
    (roles,) = found
    return roles


def names_of(program: Callable[..., Any], *args: Any, kind: str = "parameter") -> list[str]:
    return sorted(role.name for role in roles_of(program, *args) if role.kind == kind)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


class Nested(nn.Module):
    """Parameters in lists, dicts and an attribute of its own, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.by_name = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False)})
        self.scale = nn.Parameter(torch.ones(()))
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.by_name["first"](x) * self.scale * self.factors[0] + self.offset


@pytest.mark.parametrize("make", [Nested, TwoHeads, lambda: mlp(3, 3, 3)])
@pytest.mark.parametrize("called", ["module", "function"])
def test_parameters_have_their_qualified_names(make, called):
    model = make()
    program = model if called == "module" else lambda x: model(x)
    expected = sorted(name for name, _ in model.named_parameters())
    assert names_of(program, torch.ones(1, 3)) == expected


def test_parameters_of_a_compiled_method_have_their_qualified_names():
    model = TwoHeads()
    expected = sorted(name for name, _ in model.named_parameters())
    assert names_of(model.forward, torch.ones(1, 3)) == expected


def test_parameters_of_a_compiled_method_of_torch_have_their_qualified_names():
    assert names_of(mlp(3, 3).forward, torch.ones(1, 3)) == ["0.bias", "0.weight"]


def test_buffers_have_their_qualified_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = sorted(name for name, _ in model.named_buffers())
    assert names_of(model, torch.ones(3, 2), kind="buffer") == expected
    assert names_of(Nested(), torch.ones(1, 3), kind="buffer") == ["offset"]


def test_other_inputs_keep_the_name_of_their_node():
    roles = roles_of(nn.Linear(2, 2), torch.ones(1, 2))
    (x,) = (role for role in roles if role.kind == "input")
    assert "x" not in {role.name for role in roles if role is not x} and x.name


def test_tied_parameters_are_one_input():
    assert names_of(Tied(), torch.zeros(1, dtype=torch.long)) == ["embedding.weight"]


def test_a_root_that_all_share_is_left_out():
    model = mlp(2, 2)
    assert names_of(lambda x: model(x) + model[0].bias, torch.ones(1, 2)) == ["0.bias", "0.weight"]


def test_two_roots_are_told_apart():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    found = names_of(lambda x: first(x) + second(x), torch.ones(1, 2))
    assert found == ["first.bias", "first.weight", "second.bias", "second.weight"]


def test_a_bare_parameter_has_its_own_name():
    weight = nn.Parameter(torch.ones(2))
    assert names_of(lambda x: x * weight, torch.ones(2)) == ["weight"]


def test_a_bare_parameter_beside_a_module_leaves_the_root():
    weight, model = nn.Parameter(torch.ones(2)), nn.Linear(2, 2, bias=False)
    assert names_of(lambda x: model(x * weight), torch.ones(1, 2)) == ["model.weight", "weight"]


def test_modules_in_a_list():
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    found = names_of(lambda x: models[1](models[0](x)), torch.ones(1, 2))
    assert found == ["models.0.weight", "models.1.weight"]


def test_a_tensor_that_requires_grad_is_no_parameter():
    x = torch.ones(2, requires_grad=True)
    assert names_of(lambda x: x * 2, x) == []


def test_a_parameter_given_as_argument_is_a_parameter():
    assert len(names_of(lambda w, x: w * x, nn.Parameter(torch.ones(2)), torch.ones(2))) == 1


def test_a_graph_of_part_of_the_model_has_the_same_names():
    """After a graph break each graph sees some parameters only."""
    found: list[str] = []

    def backend(gm, example_inputs):
        _, roles = describe_inputs(gm, example_inputs)
        found.extend(role.name for role in roles if role.kind == "parameter")
        return gm.forward

    class Broken(Nested):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            return self.by_name["first"](x)

    torch.compile(Broken(), backend=backend)(torch.ones(1, 3))
    assert sorted(found) == ["by_name.first.weight", "layers.0.bias", "layers.0.weight"]


def test_names_are_unique_whatever_the_sources():
    gm = torch.fx.symbolic_trace(lambda a, b, c: a + b + c)
    values = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    for node in gm.graph.find_nodes(op="placeholder"):
        node._dynamo_source = type("Source", (), {"name": "L['m']._parameters['w']"})()
    assert [role.name for role in input_roles(gm, values)] == ["m.w", "m.w'", "m.w''"]


def test_a_source_whose_name_is_a_method_is_read_as_well():
    gm = torch.fx.symbolic_trace(lambda a: a + 1)
    (node,) = gm.graph.find_nodes(op="placeholder")
    node._dynamo_source = type("Source", (), {"name": lambda self: "L['self']._buffers['b']"})()
    assert input_roles(gm, [torch.ones(1)]) == [Role("buffer", "self.b")]


def test_without_sources_nodes_give_the_names():
    gm = torch.fx.symbolic_trace(lambda a, b: a + b)
    roles = input_roles(gm, [nn.Parameter(torch.ones(1)), torch.ones(1)])
    assert roles == [Role("parameter", "a"), Role("input", "b")]


def test_the_settings_that_the_backend_owns():
    config = torch._dynamo.config
    with config.patch(fail_on_recompile_limit_hit=False, skip_nnmodule_hook_guards=True):
        own_settings()
        assert config.fail_on_recompile_limit_hit and not config.skip_nnmodule_hook_guards


# Errors


def test_a_value_error_of_the_backend_reaches_the_user_as_it_is():
    def backend(gm, example_inputs):
        with user_errors_visible():
            raise ValueError("option 'x': wrong")

    with pytest.raises(ValueError) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert type(caught.value) is VisibleValueError
    assert str(caught.value).splitlines()[0] == "option 'x': wrong"


def test_a_visible_error_is_wrapped_once():
    inner = VisibleValueError("once", first_useful_frame=None)
    with pytest.raises(VisibleValueError) as caught, user_errors_visible(), user_errors_visible():
        raise inner
    assert caught.value is inner


def test_other_errors_stay_what_they_are():
    with pytest.raises(KeyError, match="key"), user_errors_visible():
        raise KeyError("key")
