"""Sums of bits: any other value of one element has another one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops.bits import INTEGERS, word_sum

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.complex64]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(DTYPES), st.integers(1, 700), st.integers(0, 2**30), st.integers(1, 4))
def test_any_flips_in_one_element_change_the_sum(dtype, numel, draw, bits):
    generator = torch.Generator().manual_seed(draw)
    x = torch.randn(numel, generator=generator).mul(50).to(dtype)
    total = word_sum(x)
    assert not torch.ops.fxpasses.changed(x, total)
    flat = torch.view_as_real(x).flatten() if dtype.is_complex else x
    width = flat.element_size() * 8
    mask = 0
    for i in range(bits):
        mask |= 1 << (draw // (i + 1)) % width
    mask -= (1 << width) if mask >> (width - 1) else 0
    flat.view(INTEGERS[flat.element_size()])[draw % numel] ^= mask
    assert torch.ops.fxpasses.changed(x, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype):
    x = torch.arange(24).to(dtype).reshape(4, 6)
    assert word_sum(x.mT) == word_sum(x) == word_sum(x.flatten().flip(0))
    assert word_sum(x[:1].expand(3, 6)) == 3 * word_sum(x[0])
    assert not torch.ops.fxpasses.changed(x.mT, word_sum(x))


def test_what_the_compiler_is_told():
    torch.library.opcheck(torch.ops.fxpasses.changed, (torch.randn(3, 4), torch.tensor(1)))
