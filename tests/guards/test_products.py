"""Checksums of products: no alarm for roundings, one for a flip that matters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpasses.guards.products import is_wrong

SIZES = st.sampled_from([1, 2, 3, 7, 32, 65, 257])
KINDS = ["normal", "positive", "alike", "sparse", "wide", "zero"]


def matrix(kind: str, rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = {
        "normal": lambda: x,
        "positive": lambda: x.abs() + 1,
        "alike": lambda: x[:, :1].expand(rows, columns),
        "sparse": lambda: torch.where(x > 1.5, x, 0.0),
        "wide": lambda: x * 10.0 ** torch.randint(-4, 4, x.shape, generator=generator),
        "zero": lambda: x * 0,
    }[kind]()
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(SIZES, SIZES, SIZES, st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(0, 99))
def test_roundings_are_no_alarm(dtype, m, k, n, left, right, seed):
    a, b = matrix(left, m, k, dtype, seed), matrix(right, k, n, dtype, seed + 1)
    d = matrix("normal", m, n, dtype, seed + 2)
    assert not is_wrong(a @ b, a, b, None)
    for added in (d, d[0], d[:1], d[:, :1], d[0, 0]):
        assert not is_wrong(torch.addmm(added, a, b), a, b, added)
    assert not is_wrong((a.mT.contiguous().mT @ b), a, b, None)
    c = torch.bmm(a.expand(3, m, k), b.expand(3, k, n))
    assert not is_wrong(c, a.expand(3, m, k), b.expand(3, k, n), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from([16, 64, 256]), st.sampled_from([16, 64, 256]), st.integers(0, 2**20))
def test_what_changes_the_product_by_more_than_a_ten_thousandth_is_noticed(dtype, m, n, seed):
    """In bf16, whose products are rounded by up to 1/512 an element, by more than 0.04."""
    share = {torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
    a, b = matrix("normal", m, 64, dtype, seed), matrix("normal", 64, n, dtype, seed + 1)
    c = a @ b
    delta = share * c.float().norm() * (1 if seed % 2 else -1)
    row, column = seed % m, seed // m % n
    c[row, column] += delta.to(dtype)
    assert is_wrong(c, a, b, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_noticed(value):
    a, b = matrix("normal", 8, 8, torch.float32, 0), matrix("normal", 8, 8, torch.float32, 1)
    c = a @ b
    c[2, 3] = value
    assert is_wrong(c, a, b, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [1.0, -0.25, 1 / 64])
@pytest.mark.parametrize("n", [8, 257, 1024])
def test_what_is_as_large_as_the_dtype_goes_is_noticed(dtype, share, n):
    a, b = matrix("normal", 8, 8, dtype, 0), matrix("normal", 8, n, dtype, 1)
    c = a @ b
    c[2, 3] = share * torch.finfo(dtype).max
    assert is_wrong(c, a, b, None)


def test_what_came_in_is_no_alarm_and_neither_is_what_may_overflow():
    a, b = matrix("normal", 8, 8, torch.float16, 0), matrix("normal", 8, 8, torch.float16, 1)
    a[1, 1] = float("nan")
    assert not is_wrong(a @ b, a, b, None)
    a, b = a.nan_to_num() * 300, b * 300
    assert not (a @ b).isfinite().all() and not is_wrong(a @ b, a, b, None)
