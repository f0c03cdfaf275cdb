"""Tensors by parameter and kind."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

from fxpasses.graph import StateSpec
from fxpasses.state import StateStore

RESIDUAL = StateSpec("residual", "w", (2, 3), torch.float32, torch.device("cpu"))


@pytest.fixture
def store() -> StateStore:
    return StateStore()


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 3))


def test_a_name_is_kind_and_parameter():
    assert RESIDUAL.name == "residual/w"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_first_use_makes_the_tensor_of_the_spec(store, weight, shape, dtype):
    spec = dataclasses.replace(RESIDUAL, shape=shape, dtype=dtype, fill=7)
    tensor = store.get(weight, spec)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    assert torch.equal(tensor, torch.full(shape, 7, dtype=dtype))


def test_later_uses_get_the_same_tensor(store, weight):
    first = store.get(weight, RESIDUAL)
    first.fill_(3)
    assert store.get(weight, RESIDUAL) is first
    assert store.get(weight, dataclasses.replace(RESIDUAL, fill=9)) is first


def test_equal_parameters_have_state_of_their_own(store):
    first, second = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    store.get(first, RESIDUAL).fill_(3)
    assert torch.equal(store.get(second, RESIDUAL), torch.zeros(2, 3))


def test_kinds_are_apart(store, weight):
    store.get(weight, RESIDUAL).fill_(3)
    scale = dataclasses.replace(RESIDUAL, kind="scale", shape=(), fill=1.0)
    store.get(weight, scale)
    assert {kind: tensor.sum().item() for kind, tensor in store.of(weight)} == {
        "residual": 18.0,
        "scale": 1.0,
    }


def test_a_parameter_without_state_has_none(store, weight):
    assert list(store.of(weight)) == []


def test_put_copies_and_detaches(store, weight):
    given = torch.ones(2, 3, requires_grad=True)
    store.put(weight, "residual", given)
    with torch.no_grad():
        given.zero_()
    tensor = store.get(weight, RESIDUAL)
    assert torch.equal(tensor, torch.ones(2, 3)) and not tensor.requires_grad


def test_put_writes_in_place_where_a_tensor_of_that_form_exists(store, weight):
    tensor = store.get(weight, RESIDUAL)
    store.put(weight, "residual", torch.ones(2, 3))
    assert store.get(weight, RESIDUAL) is tensor and torch.equal(tensor, torch.ones(2, 3))


def test_put_replaces_a_tensor_of_another_form(store, weight):
    store.get(weight, RESIDUAL)
    store.put(weight, "residual", torch.ones(5))
    assert [tuple(tensor.shape) for _, tensor in store.of(weight)] == [(5,)]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (torch.ones(3, 2), r"torch\.float32\[3, 2\]"),
        (torch.ones(2, 3, dtype=torch.float64), r"torch\.float64\[2, 3\]"),
    ],
)
def test_state_of_another_form_is_refused_by_name(store, weight, found, said):
    store.put(weight, "residual", found)
    needed = r"but the compiled graph needs torch\.float32\[2, 3\]"
    with pytest.raises(ValueError, match=f"state 'residual/w' is {said}, {needed}"):
        store.get(weight, RESIDUAL)
    assert [kind for kind, _ in store.of(weight)] == ["residual"]


def test_state_follows_the_device_of_the_spec(store, weight):
    store.get(weight, RESIDUAL)
    elsewhere = store.get(weight, dataclasses.replace(RESIDUAL, device=torch.device("meta")))
    assert elsewhere.device.type == "meta"
    assert [tensor for _, tensor in store.of(weight)] == [elsewhere]


def test_state_goes_with_its_parameter(store):
    weight = nn.Parameter(torch.ones(2, 3))
    gone = weakref.ref(store.get(weight, RESIDUAL))
    assert gone() is not None
    del weight
    gc.collect()
    assert gone() is None


def test_state_survives_a_change_of_the_parameters_data(store, weight):
    tensor = store.get(weight, RESIDUAL)
    weight.data = torch.zeros(2, 3)
    assert store.get(weight, RESIDUAL) is tensor
