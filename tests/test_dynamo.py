"""Names of inputs, and errors that reach the user."""

from __future__ import annotations

import gc
import re
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
from fxpasses.scope import Scope
from tests.graphs import TwoHeads, mlp


def described(program: Callable[..., Any], *args: Any) -> list[tuple[Scope, list[Role]]]:
    """Scope and roles of each graph that Dynamo makes of a program."""
    found: list[tuple[Scope, list[Role]]] = []

    def backend(gm, example_inputs):
        found.append(describe_inputs(gm, example_inputs))
        return gm.forward

    torch.compile(program, backend=backend)(*args)
    return found


def roles_of(program: Callable[..., Any], *args: Any) -> list[Role]:
    """The roles of the inputs of the one graph that Dynamo makes of a program."""
    ((_, roles),) = described(program, *args)
    return roles


def scope_of(program: Callable[..., Any], *args: Any) -> Scope:
    ((scope, _),) = described(program, *args)
    return scope


def parameters(roles: list[Role]) -> list[str]:
    return [role.name for role in roles if role.kind == "parameter"]


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


class Broken(Nested):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.by_name["first"](x)


def test_a_graph_of_part_of_the_model_has_the_same_names():
    """After a graph break each graph sees some parameters only."""
    (_, first), (_, second) = described(Broken(), torch.ones(1, 3))
    assert sorted(parameters(first)) == ["layers.0.bias", "layers.0.weight"]
    assert parameters(second) == ["by_name.first.weight"]


def test_both_sides_of_a_graph_break_reach_the_whole_model():
    model = Broken()
    (first, _), (second, _) = described(model, torch.ones(1, 3))
    everything = dict(model.named_parameters()) | dict(model.named_buffers())
    assert len(everything) == 8
    assert first.tensors() == second.tensors() == everything
    assert first.is_module and second.is_module


def test_the_two_sides_of_a_graph_break_are_different_code():
    (first, _), (second, _) = described(Broken(), torch.ones(1, 3))
    assert re.fullmatch(r"Broken\.forward \(test_dynamo\.py:\d+\)", first.code)
    assert re.fullmatch(r"Broken\.\w+forward\w+ \(test_dynamo\.py:\d+\)", second.code)
    assert first.code != second.code


def test_a_function_that_is_broken_keeps_the_names_of_its_closure():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)

    def program(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    found = described(program, torch.ones(1, 3))
    assert [sorted(parameters(roles)) for _, roles in found] == [
        ["first.bias", "first.weight"],
        ["second.bias", "second.weight"],
    ]
    for scope, _ in found:
        reached = ["first.weight", "first.bias", "second.weight", "second.bias"]
        assert sorted(scope.references) == sorted(reached) and not scope.is_module


# What the code reaches


def test_a_part_that_the_graph_leaves_out_is_reached():
    model = TwoHeads()
    scope = scope_of(lambda x: model.a(x), torch.ones(1, 3))
    assert list(scope.references) == ["a.weight", "a.bias", "b.weight", "b.bias"]


class Trainer:
    """No module, but holds some."""

    def __init__(self) -> None:
        self.model, self.head = mlp(3, 3), nn.Linear(3, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()

    def whole_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x)).sum() * self.scale


def test_a_module_that_is_an_attribute_gives_its_own_names():
    trainer = Trainer()
    scope = scope_of(lambda x: trainer.model(x), torch.ones(1, 3))
    assert list(scope.references) == ["0.weight", "0.bias"] and scope.is_module
    assert names_of(lambda x: trainer.model(x), torch.ones(1, 3)) == ["0.bias", "0.weight"]


def test_a_part_of_a_module_that_is_an_attribute_leads_to_the_whole():
    trainer = Trainer()
    trainer.model = mlp(3, 3, 3)
    scope = scope_of(lambda x: trainer.model[2](x), torch.ones(1, 3))
    assert list(scope.references) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert names_of(lambda x: trainer.model[2](x), torch.ones(1, 3)) == ["2.bias", "2.weight"]


def test_two_attributes_are_told_apart_by_their_paths():
    trainer = Trainer()
    found = names_of(lambda x: trainer.head(trainer.model(x)), torch.ones(1, 3))
    assert found == ["trainer.head.weight", "trainer.model.0.bias", "trainer.model.0.weight"]


def test_a_method_of_an_object_that_is_no_module():
    trainer = Trainer()
    scope = scope_of(trainer.step, torch.ones(1, 3))
    assert scope.tensors() == dict(trainer.model.named_parameters()) and scope.is_module
    assert scope.code.startswith("Sequential.step (test_dynamo.py:")
    assert names_of(trainer.step, torch.ones(1, 3)) == ["0.bias", "0.weight"]


def test_a_method_of_an_object_that_holds_several():
    found = names_of(Trainer().whole_step, torch.ones(1, 3))
    assert found == ["self.head.weight", "self.model.0.bias", "self.model.0.weight", "self.scale"]


GLOBAL, OTHER = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)


def use_global(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL(x)


def use_globals(x: torch.Tensor, both: bool) -> torch.Tensor:
    return OTHER(GLOBAL(x)) if both else GLOBAL(x)


def test_a_global_module_gives_its_own_names():
    scope = scope_of(use_global, torch.ones(1, 2))
    assert scope.tensors() == {"weight": GLOBAL.weight, "bias": GLOBAL.bias}
    assert scope.code.startswith("Linear.use_global (test_dynamo.py:")
    assert names_of(use_global, torch.ones(1, 2)) == ["bias", "weight"]


def test_a_global_that_another_function_uses_is_reached_through_what_the_graph_takes():
    scope = scope_of(lambda x: use_global(x) * 2, torch.ones(1, 2))
    assert scope.tensors() == {"weight": GLOBAL.weight, "bias": GLOBAL.bias}


@pytest.mark.parametrize("both", [True, False])
def test_names_do_not_depend_on_which_globals_a_graph_uses(both):
    ((scope, roles),) = described(use_globals, torch.ones(1, 2), both)
    assert sorted(scope.references) == ["GLOBAL.bias", "GLOBAL.weight", "OTHER.weight"]
    used = ["GLOBAL.bias", "GLOBAL.weight", "OTHER.weight"][: 3 if both else 2]
    assert sorted(parameters(roles)) == used


@pytest.mark.parametrize("both", [True, False])
def test_names_do_not_depend_on_which_parts_of_a_closure_a_graph_uses(both):
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def program(x: torch.Tensor) -> torch.Tensor:
        return second(first(x)) if both else first(x)

    ((scope, roles),) = described(program, torch.ones(1, 2))
    assert sorted(scope.references) == ["first.weight", "second.weight"]
    assert sorted(parameters(roles)) == ["first.weight", "second.weight"][: 2 if both else 1]


temperature = nn.Parameter(torch.ones(7))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.temperature


def test_a_global_that_has_the_name_of_an_attribute_is_not_reached():
    assert list(scope_of(Scaled(), torch.ones(1)).references) == ["temperature"]


def test_a_module_given_as_argument_gives_its_own_names():
    model = mlp(2, 2)
    scope = scope_of(lambda net, x: net(x), model, torch.ones(1, 2))
    assert scope.tensors() == dict(model.named_parameters()) and scope.is_module


def test_a_compiled_module_inside_a_program_is_the_module_under_it():
    model = mlp(2, 2)
    inner = torch.compile(model, backend="eager")
    scope = scope_of(lambda x: inner(x), torch.ones(1, 2))
    assert scope.tensors() == dict(model.named_parameters())
    assert names_of(lambda x: inner(x), torch.ones(1, 2)) == ["0.bias", "0.weight"]


def test_a_parameter_in_a_list_of_the_program():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    assert names_of(lambda x: x * weights[1], torch.ones(2)) == ["weights.1"]


def test_a_tensor_that_the_code_makes_itself_is_an_input_of_no_scope():
    model = nn.Linear(2, 2)
    scope = scope_of(lambda x: model(x) + torch.ones(2) * 3, torch.ones(1, 2))
    assert sorted(scope.references) == ["bias", "weight"]


def test_describing_keeps_no_module_alive():
    model = mlp(2, 2)
    scope = scope_of(model, torch.ones(1, 2))
    assert len(scope.tensors()) == 2
    del model
    torch._dynamo.reset()
    gc.collect()
    assert scope.tensors() == {}


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
