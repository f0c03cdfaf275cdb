"""Unscaled gradients, whether they are finite, and their norm."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from custom_ops import gradients as ops
from tests.custom_ops.buckets import drawn, reference, values

FACTOR = torch.tensor(2.0**-7)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unscaled(flat: torch.Tensor, factor: torch.Tensor = FACTOR):
    """The results, after they were found to be the reference's; a norm's last bit is left open."""
    results = ops.unscale(flat, factor)
    with reference():
        expected = ops.unscale(flat, factor)
    assert (
        torch.equal(results[0].view(torch.int32), expected[0].view(torch.int32))
        or flat.isnan().any()
    )
    assert torch.equal(results[1], expected[1])
    torch.testing.assert_close(results[2], expected[2], rtol=2.0**-23, atol=0, equal_nan=True)
    return results


@drawn
def test_products_are_rounded_once(data):
    flat = data.draw(values(data.draw(st.sampled_from((1, 7, 100, 5000)))))
    flat = flat.to(data.draw(st.sampled_from(DTYPES)))
    product, found, norm = unscaled(
        flat, torch.tensor(data.draw(st.sampled_from((2.0**-16, 0.3, 1.0))))
    )
    assert product.dtype == torch.float32 and norm.shape == found.shape == ()
    assert found.item() == float(not product.isfinite().all())
    exact = product.double().norm().float()
    torch.testing.assert_close(norm, exact, rtol=2.0**-22, atol=0, equal_nan=True)


def test_nothing():
    product, found, norm = unscaled(torch.empty(0))
    assert product.shape == (0,) and found == 0 and norm == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 4095, 4096, 4999])
def test_one_bad_number_is_found(bad, where):
    flat = torch.ones(5000)
    flat[where] = bad
    _, found, norm = unscaled(flat)
    assert found == 1 and not norm.isfinite()


def test_a_norm_overflows_later_than_its_squares():
    _, found, norm = unscaled(torch.full((4,), 2.0**100), torch.tensor(1.0))
    assert found == 0 and norm == 2.0**101


def test_an_overflow_of_a_product_is_found():
    assert unscaled(torch.tensor([1.0, 2.0**100]), torch.tensor(2.0**100))[1] == 1


def test_threads_change_nothing():
    flat, before, norms = torch.randn(300_000), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            norms.append(ops.unscale(flat, FACTOR)[2])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*norms)


def test_derivatives():
    flat = torch.randn(9, requires_grad=True)
    factor = torch.tensor(0.5, requires_grad=True)
    product, found, norm = ops.unscale(flat, factor)
    assert not found.requires_grad
    (product.sum() + 3 * norm).backward()
    other, by = flat.detach().clone().requires_grad_(), torch.tensor(0.5, requires_grad=True)
    ((other * by).sum() + 3 * (other * by).norm()).backward()
    torch.testing.assert_close(flat.grad, other.grad)
    torch.testing.assert_close(factor.grad, by.grad)


def test_schema_and_fake():
    for flat in (torch.randn(20, requires_grad=True), torch.randn(20).bfloat16()):
        torch.library.opcheck(torch.ops.fxpasses.unscale.default, (flat, FACTOR))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.unscale(torch.ones(8).double(), torch.ones(())), "flat: expected .*float64"),
        (lambda: ops.unscale(torch.ones(4, 2), torch.ones(())), r"flat: .*\[8\]"),
        (lambda: ops.unscale(torch.ones(8), torch.ones(2)), r"factor: .*\[2\]"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(ValueError, match=message), torch._subclasses.FakeTensorMode():
        call()
