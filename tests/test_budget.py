"""Levels within an error budget: the best there are, and errors that real gradients have."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops.layout import Layout, TopKLayout
from custom_ops.quantise import dequantise, quantise
from custom_ops.topk import topk_decode, topk_encode
from fxpasses.budget import bits, cheapest, relative_error
from fxpasses.compression import Scheme


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_nothing_cheaper_keeps_the_budget(data):
    layers, levels = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 20), min_size=levels, max_size=levels)
    costs = data.draw(st.lists(numbers, min_size=layers, max_size=layers))
    errors = data.draw(st.lists(numbers, min_size=layers, max_size=layers))
    budget = data.draw(st.sampled_from([1, 2, 5, 10, 20, 50]))  # a thousandth divides all errors

    def total(rows, choice):
        return sum(row[i] for row, i in zip(rows, choice, strict=True))

    choices = itertools.product(range(levels), repeat=layers)
    within = [c for c in choices if total(errors, c) <= budget]
    found = cheapest(costs, errors, budget)
    if not within:
        assert found == [row.index(min(row)) for row in errors]
        return
    assert total(errors, found) <= budget
    assert total(costs, found) == min(total(costs, c) for c in within)


def test_without_a_budget_each_takes_what_loses_least():
    assert cheapest([[1, 2], [3, 1]], [[5.0, 0.1], [0.2, 0.3]], 0.0) == [1, 0]


@pytest.mark.parametrize("group", [8, 32, 128, 1024])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_error_of_integers_is_that_of_gaussian_gradients(name, group):
    torch.manual_seed(0)
    scheme, gradient = Scheme(name, group=group), torch.randn(1 << 17)
    layout = Layout((gradient.numel(),), bits=scheme.bits, group=group)
    payload, _ = quantise(gradient, None, None, *layout.fields)
    lost = dequantise(payload[None], *layout.fields) - gradient
    measured = float(lost.square().sum() / gradient.square().sum())
    # The largest of a group varies, and its square is larger than that of the expected one.
    assert relative_error(scheme, (1 << 17,)) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 1.0])
def test_the_error_of_topk_is_that_of_gaussian_gradients(ratio):
    torch.manual_seed(0)
    scheme, gradient = Scheme("topk", ratio=ratio), torch.randn(1 << 17)
    layout = TopKLayout(gradient.numel(), ratio)
    payload, _ = topk_encode(gradient, torch.zeros_like(gradient), *layout.fields)
    lost = topk_decode(payload[None], *layout.fields) - gradient
    measured = float(lost.square().sum() / gradient.square().sum())
    assert relative_error(scheme, (1 << 17,)) == pytest.approx(measured, abs=5e-3)


def test_the_error_of_thin_matrices_is_that_of_a_gradient_without_structure():
    assert relative_error(Scheme("powersgd", rank=2), (8, 4, 5)) == 0.75
    assert relative_error(Scheme("powersgd", rank=9), (8, 20)) == 0.0


def test_bits():
    assert bits(Scheme("int4", group=64), (10, 20)) == 200 * 4.25
    assert bits(Scheme("topk", ratio=0.1), (10, 20)) == 32 * 20
    assert bits(Scheme("powersgd", rank=2), (10, 4, 5)) == 32 * 2 * (10 + 20)
