"""Digests of tensors: any bits that differ in an element change them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpasses.guards.replicas import digest, halves

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 3000), st.integers(0, 2**30), st.integers(1, 255))
def test_bits_that_differ_change_it(dtype, numel, seed, mask):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    y = x.clone()
    raw = y.view(torch.uint8) if not y.is_complex() else torch.view_as_real(y).view(torch.uint8)
    raw.view(-1)[seed % raw.numel()] ^= mask
    assert digest(x).tolist() == digest(x.clone()).tolist()
    assert digest(x)[0] != digest(y)[0]


def test_elements_that_change_places_change_it():
    x = torch.arange(2048.0)
    y = x.clone()
    y[[3, 9]] = x[[9, 3]]
    assert digest(x)[0] == digest(y)[0] and digest(x)[1] != digest(y)[1]
    assert digest(x.view(2, 1024).t().contiguous().t()).tolist() == digest(x).tolist()


def test_halves_lose_nothing():
    values = torch.tensor([[0, 1], [-(2**63), 2**63 - 1], [-1, 2**32]])
    found = halves(values)
    assert (found[:, :2] + (found[:, 2:] << 32)).tolist() == values.tolist()
    assert (found == found.neg().neg()).all() and (found.abs() <= 2**32).all()
