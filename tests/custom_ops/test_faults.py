"""An element that is damaged, or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from custom_ops import faults as ops
from fxpasses.faults import models
from fxpasses.faults.spec import parse_faults
from tests.custom_ops.buckets import drawn, on_both

SITE = 77


@drawn
def test_the_same_as_in_aten_operators(data):
    dtype = data.draw(st.sampled_from(list(models.FORMS)))
    shape = data.draw(st.sampled_from(((1,), (5,), (3, 4), (5000,))))
    x = torch.randn(shape).mul(50).to(dtype)
    (fault,) = parse_faults(
        data.draw(st.sampled_from(("bitflip{bits=3}", "stuck{bit=2,value=1}", "zero{}")))
    )
    draw = data.draw(st.integers(0, 2**40))
    row = torch.tensor(models.row_of(fault, SITE, dtype, draw))
    site = data.draw(st.sampled_from((SITE, 5)))
    struck, news = on_both(ops.strike, x, row, site)
    expected, expected_news = models.strike(x, row, fault, site)
    integer = ops.INTEGERS[dtype.itemsize]
    assert torch.equal(struck.view(integer), expected.view(integer))
    if dtype == torch.uint8:  # a signed integer's bits, there an unsigned one's
        news[2:], expected_news[2:] = news[2:] & 255, expected_news[2:] & 255
    assert torch.equal(news, expected_news)
    assert news[0] == (site == SITE)


def test_any_index_is_within():
    row = torch.tensor([SITE, -1, -1, 1, 0])
    struck, news = on_both(ops.strike, torch.zeros(5, dtype=torch.int8), row, SITE)
    assert struck.tolist() == [0, 0, 0, 0, 1] and news.tolist() == [1, 4, 0, 1]


def test_nothing_to_strike():
    struck, news = on_both(ops.strike, torch.empty(0, 3), torch.tensor([SITE, 7, 0, 0, 0]), SITE)
    assert struck.shape == (0, 3) and not news.any()


def test_the_gradient_is_that_of_no_damage():
    x = torch.randn(4, requires_grad=True)
    struck, news = ops.strike(x, torch.tensor([SITE, 2, 0, 0, 0]), SITE)
    assert not news.requires_grad and struck[2] == 0
    (struck * torch.arange(4.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(4.0))


def test_schema_and_fake():
    for x in (torch.randn(3, 4, requires_grad=True), torch.ones(5).byte()):
        row = torch.tensor([SITE, 2, 0, 0, 0])
        torch.library.opcheck(torch.ops.fxpasses.strike.default, (x, row, SITE))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.strike(torch.ones(4)[::2], torch.zeros(5).long(), 1), "x: .*not contiguous"),
        (lambda: ops.strike(torch.ones(4) * 1j, torch.zeros(5).long(), 1), "x: .*complex64"),
        (lambda: ops.strike(torch.ones(4), torch.zeros(5), 1), "row: .*float32"),
        (lambda: ops.strike(torch.ones(4), torch.zeros(4).long(), 1), r"row: .*\[4\]"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(ValueError, match=message), torch._subclasses.FakeTensorMode():
        call()
