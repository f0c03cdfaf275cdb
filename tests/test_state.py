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


# One tensor of several parameters


def parts_of(store: StateStore, named: dict[str, torch.Tensor]) -> torch.Tensor:
    sizes = tuple((name, p.numel()) for name, p in named.items())
    shape = (sum(size for _, size in sizes),)
    spec = StateSpec(
        "residual", sizes[0][0], shape, torch.float32, torch.device("cpu"), parts=sizes
    )
    return store.get_for(spec, named.__getitem__)


def residuals(store: StateStore, named: dict[str, torch.Tensor]) -> list[list[float]]:
    return [dict(store.of(p))["residual"].tolist() for p in named.values()]


def test_parts_are_views_of_one_tensor_that_stays(store):
    named = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3, 1))}
    flat = parts_of(store, named)
    flat.copy_(torch.arange(5.0))
    assert residuals(store, named) == [[0, 1], [2, 3, 4]]
    assert parts_of(store, named) is flat


def test_another_order_or_selection_takes_the_values_along(store):
    named = {name: nn.Parameter(torch.ones(size)) for name, size in (("a", 2), ("b", 3), ("c", 1))}
    parts_of(store, named).copy_(torch.arange(6.0))
    turned = parts_of(store, {"c": named["c"], "a": named["a"]})
    assert turned.tolist() == [5, 0, 1]
    turned.mul_(10)
    assert residuals(store, named) == [[0, 10], [2, 3, 4], [50]]
    assert parts_of(store, named).tolist() == [0, 10, 2, 3, 4, 50]


def test_values_that_are_put_are_in_the_flat_tensor(store):
    named = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(1))}
    store.put(named["b"], "residual", torch.tensor([7.0]))  # before anything is flat
    flat = parts_of(store, named)
    store.put(named["a"], "residual", torch.tensor([1.0, 2.0]))
    assert flat.tolist() == [1, 2, 7] and parts_of(store, named) is flat


def test_a_part_of_another_size_is_named(store):
    named = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(1))}
    store.put(named["b"], "residual", torch.ones(4))
    with pytest.raises(ValueError, match="state 'residual/b' is torch.float32"):
        parts_of(store, named)
