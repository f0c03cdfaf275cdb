"""What code can reach, and by which names."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fxpasses.scope import Scope, scope_of
from tests.graphs import WORLD, TwoHeads, mlp


def reached(**variables: Any) -> Scope:
    return scope_of("step (train.py:3)", variables)


def names(**variables: Any) -> list[str]:
    return list(reached(**variables).references)


def bare() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


def assert_consistent(scope: Scope) -> None:
    """Both mappings know the same tensors."""
    tensors = scope.tensors()
    assert {id(tensor): name for name, tensor in tensors.items()} == scope.names
    assert list(tensors) == list(scope.references)


# Roots


def test_one_module_gives_its_own_names_in_its_own_order():
    model = mlp(3, 2, 2)
    scope = reached(self=model, x=torch.ones(1))
    assert list(scope.references) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert scope.is_module and scope.tensors() == dict(model.named_parameters())
    assert_consistent(scope)


def test_several_modules_are_told_apart_by_their_variables():
    a, b = bare(), mlp(3, 2)
    scope = reached(a=a, b=b)
    assert list(scope.references) == ["a.weight", "b.0.weight", "b.0.bias"]
    assert not scope.is_module
    assert scope.tensors()["b.0.bias"] is b[0].bias
    assert_consistent(scope)


def test_a_bare_parameter_goes_by_its_variable_and_is_no_module():
    scope = reached(scale=nn.Parameter(torch.ones(1)))
    assert list(scope.references) == ["scale"] and not scope.is_module


def test_a_bare_parameter_beside_a_module():
    scope = reached(scale=nn.Parameter(torch.ones(1)), model=bare())
    assert list(scope.references) == ["scale", "model.weight"] and not scope.is_module


def test_a_module_under_two_variables_is_one_root_with_its_own_names():
    model = bare()
    scope = reached(net=model, again=model)
    assert list(scope.references) == ["weight"] and scope.is_module


@pytest.mark.parametrize("outer_first", [True, False])
def test_a_part_of_another_root_is_no_root(outer_first):
    model = mlp(3, 2, 2)
    variables = {"whole": model, "part": model[2]}
    given = variables if outer_first else dict(reversed(variables.items()))
    scope = reached(**given)
    assert list(scope.references) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert scope.is_module


def test_a_parameter_of_another_root_is_no_root():
    model = mlp(3, 2)
    scope = reached(weight=model[0].weight, model=model)
    assert list(scope.references) == ["0.weight", "0.bias"] and scope.is_module


def test_of_roots_within_roots_the_outermost_counts():
    whole = nn.Sequential(mlp(3, 2), bare())
    found = names(inner=whole[0][0], middle=whole[0], other=bare(), whole=whole)
    assert found == ["other.weight", "whole.0.0.weight", "whole.0.0.bias", "whole.1.weight"]


def test_a_compiled_module_is_the_module_under_it():
    model = mlp(3, 2)
    compiled = torch.compile(model, backend="eager")
    assert names(model=compiled) == ["0.weight", "0.bias"]
    scope = reached(compiled=compiled, model=model)
    assert scope.is_module and scope.code.startswith("Sequential.")


def test_compiling_a_part_changes_no_name():
    model = mlp(3, 2, 2)
    plain = names(model=model)
    model[0] = torch.compile(model[0], backend="eager")
    assert names(model=model) == plain


def test_nothing_to_reach_is_an_empty_scope():
    scope = reached(x=torch.ones(2), n=3, f=len, text="model", nothing=None, empty=[])
    assert scope == Scope("step (train.py:3)", {}, {}, False)


def test_a_module_without_parameters_is_a_root_all_the_same():
    scope = reached(act=nn.ReLU())
    assert scope.is_module and scope.references == {} and scope.code == "ReLU.step (train.py:3)"
    assert names(act=nn.ReLU(), model=bare()) == ["model.weight"]


# Containers


def test_modules_in_lists_tuples_and_dicts_are_found_two_levels_deep():
    found = names(
        layers=[bare(), nn.Parameter(torch.ones(1))],
        pair=(bare(), 3),
        by_name={"first": bare(), "deep": {"er": bare(), "est": [bare()]}},
    )
    assert found == [
        "layers.0.weight",
        "layers.1",
        "pair.0.weight",
        "by_name.first.weight",
        "by_name.deep.er.weight",
    ]


def test_a_container_of_one_module_counts_as_that_module():
    scope = reached(models=[bare()])
    assert list(scope.references) == ["weight"] and scope.is_module


def test_a_dict_whose_keys_are_no_strings_is_not_looked_into():
    assert names(table={1: bare()}, mixed={"a": bare(), 2: bare()}) == []


def test_a_container_that_holds_itself_is_looked_into_once():
    endless: list[Any] = [bare()]
    endless.append(endless)
    assert names(model=endless) == ["weight"]


def test_a_plain_tensor_is_not_reached():
    assert names(x=torch.ones(1, requires_grad=True), xs=[torch.ones(1)]) == []


# Names


def test_tied_parameters_take_the_first_name():
    model = TwoHeads()
    model.b.weight = model.a.weight
    scope = reached(self=model)
    assert list(scope.references) == ["a.weight", "a.bias", "b.bias"]
    assert scope.names[id(model.b.weight)] == "a.weight"
    assert_consistent(scope)


def test_parameters_tied_over_roots_take_the_name_in_the_first_root():
    first, second = bare(), nn.Linear(2, 2)
    second.weight = first.weight
    assert names(first=first, second=second) == ["first.weight", "second.bias"]
    assert names(second=second, first=first) == ["second.weight", "second.bias"]


def test_buffers_come_behind_the_parameters_of_their_module():
    norm = nn.BatchNorm1d(2)
    scope = reached(norm=norm)
    buffers = ["running_mean", "running_var", "num_batches_tracked"]
    assert list(scope.references) == ["weight", "bias", *buffers]
    assert_consistent(scope)


def test_a_buffer_that_is_not_saved_is_reached_as_well():
    model = nn.Module()
    model.register_buffer("mask", torch.ones(2), persistent=False)
    assert names(model=model, other=bare()) == ["model.mask", "other.weight"]


def test_a_parameter_that_is_frozen_is_reached():
    model = bare()
    model.weight.requires_grad_(False)
    assert names(model=model) == ["weight"]


# What is left out


def test_a_lazy_parameter_is_left_out_until_it_has_a_value():
    model = nn.Sequential(nn.LazyLinear(2), bare())
    assert names(model=model) == ["1.weight"]
    model(torch.ones(1, 3))
    assert names(model=model) == ["0.weight", "0.bias", "1.weight"]


def test_a_lazy_buffer_is_left_out_until_it_has_a_value():
    model = nn.LazyBatchNorm1d(affine=False)
    assert names(model=model) == ["num_batches_tracked"]
    model(torch.ones(2, 3))
    assert sorted(names(model=model)) == ["num_batches_tracked", "running_mean", "running_var"]


def test_a_sparse_buffer_is_left_out():
    model = bare()
    model.register_buffer("graph", torch.eye(2).to_sparse())
    assert names(model=model) == ["weight"]


def test_a_sharded_parameter_is_left_out(fake_world):
    model = nn.Linear(2, 2)
    local = torch.ones(2, 2)
    mesh = init_device_mesh("cpu", (WORLD,))
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
    assert names(model=model) == ["bias"]


# The code


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"self": mlp(2, 2)}, "Sequential.step (train.py:3)"),
        ({"a": bare(), "b": bare()}, "step (train.py:3)"),
        ({"w": nn.Parameter(torch.ones(1))}, "step (train.py:3)"),
        ({}, "step (train.py:3)"),
    ],
    ids=["a module", "two modules", "a parameter", "nothing"],
)
def test_the_code_has_the_class_of_the_one_module_in_front(variables, code):
    assert reached(**variables).code == code


def test_two_modules_of_one_form_have_equal_names_and_code():
    """So have two ranks."""
    models = mlp(3, 2), mlp(3, 2)
    first, second = (reached(self=model) for model in models)
    assert (first.code, list(first.references)) == (second.code, list(second.references))
    assert first.names.keys().isdisjoint(second.names)


# Lifetimes


def test_a_scope_keeps_no_tensor_alive():
    model = mlp(3, 2)
    scope = reached(self=model)
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None
    assert scope.tensors() == {}
    assert [reference() for reference in scope.references.values()] == [None, None]


def test_a_parameter_that_was_replaced_is_no_longer_among_the_tensors():
    model = mlp(3, 2)
    scope = reached(self=model)
    model[0].bias = nn.Parameter(torch.ones(2))
    gc.collect()
    assert scope.tensors() == {"0.weight": model[0].weight}
