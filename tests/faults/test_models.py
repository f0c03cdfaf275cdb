"""What each model does to the bits, against numpy, for each dtype."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpasses.faults import models
from fxpasses.faults.models import AFTER, AT, BEFORE, FORMS, HITS, check_dtype, row_of, strike
from fxpasses.faults.spec import Fault

UNSIGNED = {64: np.uint64, 32: np.uint32, 16: np.uint16, 8: np.uint8}
FLOATS = [d for d in FORMS if d.is_floating_point]
MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
SITE = 12345
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
seeds = st.integers(0, 2**62)


def bits_of(x: torch.Tensor) -> np.ndarray:
    """Unsigned, flattened."""
    width = FORMS[x.dtype].width
    raw = x.contiguous().flatten().view(torch.uint8) if x.numel() else x.flatten()
    return raw.numpy().copy().view(UNSIGNED[width])


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, NaN and infinity too; not contiguous where it has two dimensions."""
    random = np.random.default_rng(seed)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))
    x = raw.view(dtype).reshape(shape[::-1])
    return x.permute(list(range(len(shape)))[::-1])


def struck(fault: Fault, x: torch.Tensor, seed: int) -> tuple[np.ndarray, list[int]]:
    row = torch.tensor(row_of(fault, SITE, x.dtype, seed))
    new, news = strike(x, row, fault, SITE)
    assert (new.shape, new.dtype) == (x.shape, x.dtype)
    return bits_of(new), news.tolist()


def check_one(x: torch.Tensor, after: np.ndarray, news: list[int], expected) -> None:
    """Exactly one element differs: the one in the news, and as `expected(bits before)` says."""
    before = bits_of(x)
    index = news[AT]
    want = before.copy()
    want[index] = expected(before[index])
    np.testing.assert_array_equal(after, want)
    mask = (1 << FORMS[x.dtype].width) - 1
    assert news[HITS] == 1 and 0 <= index < x.numel()
    assert news[BEFORE] & mask == int(before[index])
    assert news[AFTER] & mask == int(want[index])


@pytest.mark.parametrize("dtype", FORMS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes, seeds, st.sets(st.integers(0, 63), min_size=1, max_size=4))
def test_bitflip_of_given_bits(dtype, shape, seed, bits):
    width = FORMS[dtype].width
    bits = tuple(sorted({bit % width for bit in bits}))
    x = tensor(shape, dtype, seed)
    after, news = struck(Fault("bitflip", bit=bits), x, seed)
    mask = sum(1 << bit for bit in bits)
    check_one(x, after, news, lambda b: b ^ UNSIGNED[width](mask))


@pytest.mark.parametrize("dtype", FORMS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes, seeds, st.integers(1, 8))
def test_bitflip_of_drawn_bits_flips_so_many(dtype, shape, seed, count):
    x = tensor(shape, dtype, seed)
    after, news = struck(Fault("bitflip", bits=count), x, seed)
    before = bits_of(x)
    assert bin(int(before[news[AT]]) ^ int(after[news[AT]])).count("1") == count
    check_one(x, after, news, lambda b: after[news[AT]])


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("value", [0, 1])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(shapes, seeds, st.integers(0, 63))
def test_stuck(dtype, value, shape, seed, bit):
    width = FORMS[dtype].width
    mask = UNSIGNED[width](1 << bit % width)
    x = tensor(shape, dtype, seed)
    after, news = struck(Fault("stuck", bit=(bit % width,), value=value), x, seed)
    check_one(x, after, news, lambda b: b | mask if value else b & ~mask)


@pytest.mark.parametrize("dtype", FORMS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(shapes, seeds)
def test_zero(dtype, shape, seed):
    x = tensor(shape, dtype, seed)
    check_one(x, *struck(Fault("zero"), x, seed), lambda b: 0)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(shapes, seeds)
def test_sign(dtype, shape, seed):
    width = FORMS[dtype].width
    x = tensor(shape, dtype, seed)
    top = UNSIGNED[width](1 << (width - 1))
    check_one(x, *struck(Fault("sign"), x, seed), lambda b: b ^ top)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("model", "number"), [("nan", math.nan), ("inf", math.inf)])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(shapes, seeds)
def test_nan_and_inf(dtype, model, number, shape, seed):
    x = tensor(shape, dtype, seed)
    bits = bits_of(torch.tensor(number, dtype=dtype))[0]
    check_one(x, *struck(Fault(model), x, seed), lambda b: bits)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(shapes, seeds, st.floats(-4, 4, width=16))
def test_scale(dtype, shape, seed, factor):
    finite = torch.nan_to_num(tensor(shape, dtype, seed), 1.0, 1.0, -1.0)
    after, news = struck(Fault("scale", factor=factor), finite, seed)
    single = finite.flatten()[news[AT]]
    if dtype == torch.float64:
        product = torch.tensor(np.float64(single.item()) * np.float64(factor))
    else:  # rounded once, from fp32
        exact = np.float32(single.float().item()) * np.float32(factor)
        product = torch.tensor(exact).to(dtype)
    check_one(finite, after, news, lambda b: bits_of(product)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(shapes, seeds, st.integers(1, 7))
def test_truncate_everything(dtype, shape, seed, bits):
    x = tensor(shape, dtype, seed)
    after, news = struck(Fault("truncate", bits=bits), x, seed)
    low = UNSIGNED[FORMS[dtype].width]((1 << bits) - 1)
    np.testing.assert_array_equal(after, bits_of(x) & ~low)
    assert news[:2] == [x.numel(), 0]


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seeds, st.sampled_from([0.0, 0.1, 0.5]))
def test_truncate_a_share(seed, probability):
    x = torch.full((20_000,), 1 / 3)
    after, news = struck(Fault("truncate", bits=10, probability=probability), x, seed)
    changed = (after != bits_of(x)).sum()
    assert news[HITS] == changed
    assert abs(changed - 20_000 * probability) <= 5 * math.sqrt(20_000 * 0.25)
    assert set(after.tolist()) <= {int(bits_of(x)[0]), int(bits_of(x)[0]) & ~1023}


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("model", ["bitflip", "stuck", "zero"])
def test_what_is_armed_elsewhere_changes_nothing(dtype, model):
    x = tensor((3, 4), dtype, 1)
    fault = Fault(model, bit=(3,))
    for row in (row_of(fault, SITE + 2, dtype, 7), [0] * models.ROW):
        new, news = strike(x, torch.tensor(row), fault, SITE)
        np.testing.assert_array_equal(bits_of(new), bits_of(x))
        assert news.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_mantissas(dtype):
    assert FORMS[dtype].mantissa == MANTISSA[dtype]


@pytest.mark.parametrize(
    ("fault", "dtype", "message"),
    [
        (
            Fault("bitflip", bit=(16,)),
            torch.bfloat16,
            "bit 16 is outside of bfloat16, which has bits 0 to 15",
        ),
        (Fault("bitflip", bit=(8,)), torch.uint8, "bit 8 is outside of uint8"),
        (Fault("truncate", bits=24), torch.float32, "got 24 bits; float32 has 23 to choose from"),
        (Fault("bitflip", bits=33), torch.float32, "got 33 bits; float32 has 32 to choose from"),
        (
            Fault("nan"),
            torch.int8,
            "'nan' has no meaning for int8; use bitflip, stuck or zero there",
        ),
    ],
)
def test_what_a_dtype_does_not_have_is_refused(fault, dtype, message):
    with pytest.raises(ValueError, match="option 'faults'") as caught:
        check_dtype(fault, dtype)
    assert message in str(caught.value)


def test_draws_are_the_same_everywhere():
    """Written down once: a resumed run, or another machine, draws the same."""
    assert models.drawn(0, 1, 20) == 3718012954357926853
    assert models.drawn_bits(7, 3, 32) == [3, 30, 14]
