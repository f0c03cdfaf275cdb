"""The largest elements of a bucket."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from custom_ops import topk as ops
from custom_ops.layout import CHUNK, HEADER_BYTES, TopKLayout
from tests.custom_ops.buckets import FLT_MAX, drawn, on_both, values

LAYOUTS = st.builds(
    TopKLayout,
    st.sampled_from((0, 1, 2, 15, 100, 1000, 5000)),
    st.sampled_from((1e-9, 0.01, 0.1, 0.5, 1.0)),
)


def encoded(flat: torch.Tensor, residual: torch.Tensor, layout: TopKLayout):
    return on_both(ops.topk_encode, flat, residual, *layout.fields)


def decoded(payload: torch.Tensor, layout: TopKLayout) -> torch.Tensor:
    return on_both(ops.topk_decode, payload[None], *layout.fields)


@drawn
def test_sent_and_residual_are_the_whole(data):
    layout = data.draw(LAYOUTS)
    flat, residual = data.draw(values(layout.numel)) / 2, data.draw(values(layout.numel)) / 2
    payload, kept = encoded(flat, residual, layout)
    sent = decoded(payload, layout)
    total = flat + residual
    assert torch.equal(sent.double() + kept.double(), total.double())
    assert (kept.abs() <= 2.0**-8 * total.abs() + 2.0**-134)[sent != 0].all()


@drawn
def test_the_largest_are_sent(data):
    layout = data.draw(LAYOUTS)
    flat = data.draw(values(layout.numel))
    payload, _ = encoded(flat, torch.zeros(layout.numel), layout)
    sent = decoded(payload, layout) != 0
    rounds_to_zero = flat.abs() <= 2.0**-134
    if not rounds_to_zero.all():
        smallest_sent = flat[sent].abs().min()
        assert (flat[~sent].abs() <= smallest_sent).all()
        nonzero = int((~rounds_to_zero).sum())
        assert min(layout.entries, nonzero) - int(sent.sum()) in range(
            int(rounds_to_zero.sum()) + 1
        )


def test_of_equal_ones_the_first():
    layout = TopKLayout(1000, 0.01)
    payload, kept = encoded(torch.full((1000,), -2.0), torch.zeros(1000), layout)
    assert torch.equal(decoded(payload, layout), torch.where(torch.arange(1000) < 10, -2.0, 0.0))
    assert torch.equal(kept, torch.where(torch.arange(1000) < 10, 0.0, -2.0))


def test_chunks_have_quotas_of_their_own():
    numel = 2 * CHUNK + 100
    layout = TopKLayout(numel, 0.01)
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(numel, generator=generator)
    flat[:CHUNK] *= 1000  # would be all that is sent
    flat[CHUNK : 2 * CHUNK] *= torch.rand(CHUNK, generator=generator) < 0.001  # less than its quota
    payload, _ = encoded(flat, torch.zeros(numel), layout)
    sent = (decoded(payload, layout) != 0).split(CHUNK)
    nonzero = int((flat[CHUNK : 2 * CHUNK] != 0).sum())
    assert [int(chunk.sum()) for chunk in sent] == [656, nonzero, 1]
    assert nonzero < 656


@pytest.mark.parametrize("shape", ["uniform", "outliers", "equal", "rising", "periodic"])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3])
def test_whatever_the_sample_suggests(shape, ratio):
    """Distributions for which a sampled threshold is far off, in both directions."""
    flat = {
        "uniform": torch.rand(CHUNK, generator=torch.Generator().manual_seed(1)),
        "outliers": torch.where(torch.arange(CHUNK) % 97 == 5, 1e6, 1e-6),
        "equal": torch.ones(CHUNK),
        "rising": torch.arange(CHUNK).float(),
        "periodic": torch.where(torch.arange(CHUNK) % 64 == 0, 1.0, 0.5),  # all samples are large
    }[shape]
    layout = TopKLayout(CHUNK, ratio)
    payload, _ = encoded(flat, torch.zeros(CHUNK), layout)
    sent = decoded(payload, layout) != 0
    assert int(sent.sum()) == layout.quota(0)
    assert flat[sent].min() >= flat[~sent].max()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_mean_of_ranks(world):
    layout = TopKLayout(1000, 0.1)
    flats = [torch.randn(1000) for _ in range(world)]
    payloads = [encoded(flat, torch.zeros(1000), layout)[0] for flat in flats]
    mean = on_both(ops.topk_decode, torch.stack(payloads), *layout.fields)
    exact = torch.stack([decoded(payload, layout) for payload in payloads]).double().mean(0)
    torch.testing.assert_close(mean.double(), exact, rtol=1e-6, atol=1e-7)


def test_the_largest_numbers():
    layout = TopKLayout(4, 0.5)
    flat = torch.tensor([FLT_MAX, -FLT_MAX, 1.0, 0.0])
    payload, kept = encoded(flat, torch.zeros(4), layout)
    mean = on_both(ops.topk_decode, torch.stack([payload] * 3), *layout.fields)
    assert mean.isfinite().all() and kept.isfinite().all() and mean[0] > 0.99 * FLT_MAX


@pytest.mark.parametrize(
    ("bad", "where"), [(math.nan, 0), (math.inf, CHUNK), (-math.inf, CHUNK + 16)]
)
def test_one_bad_number_marks_the_payload(bad, where):
    layout = TopKLayout(CHUNK + 17, 0.01)
    good, residual = torch.randn(2, CHUNK + 17)
    flat = good.clone()
    flat[where] = bad
    payload, kept = encoded(flat, residual, layout)
    assert payload[0] == 0 and torch.equal(kept, residual)
    payloads = torch.stack([encoded(good, residual, layout)[0], payload])
    assert on_both(ops.topk_decode, payloads, *layout.fields).isnan().all()


@drawn
def test_damaged_payloads_are_decoded_alike(data):
    """Offsets beyond the end of the last chunk write nothing."""
    layout = data.draw(LAYOUTS)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    payloads = torch.randint(256, (2, layout.payload_bytes), generator=generator).to(torch.uint8)
    payloads[:, 0] = 1
    on_both(ops.topk_decode, payloads, *layout.fields)


def test_entries_left_over_are_zero():
    layout = TopKLayout(100, 0.05)
    flat = torch.zeros(100)
    flat[7] = 3.0
    payload, _ = encoded(flat, flat, layout)
    expected = torch.zeros(layout.payload_bytes).byte()
    expected[0] = 1
    expected[HEADER_BYTES : HEADER_BYTES + 2] = torch.tensor([6.0]).bfloat16().view(torch.uint8)
    expected[layout.offsets_offset] = 7
    assert torch.equal(payload, expected)


def test_threads_change_nothing():
    layout = TopKLayout(5 * CHUNK + 3, 0.01)
    flat, residual = torch.randn(2, layout.numel)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            payload, kept = ops.topk_encode(flat, residual, *layout.fields)
            results.append((payload, kept, ops.topk_decode(payload[None], *layout.fields)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_schema_and_fake():
    layout = TopKLayout(20, 0.1)
    args = (torch.randn(20), torch.randn(20), *layout.fields)
    payload, _ = ops.topk_encode(*args)
    torch.library.opcheck(torch.ops.fxpasses.topk_encode.default, args)
    torch.library.opcheck(torch.ops.fxpasses.topk_decode.default, (payload[None], *layout.fields))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.topk_encode(torch.ones(7), torch.ones(7), 8, 0.1), r"flat: .*\[8\].*\[7\]"),
        (lambda: ops.topk_encode(torch.ones(8), torch.ones(7), 8, 0.1), "residual: "),
        (lambda: ops.topk_encode(torch.ones(8), torch.ones(8), 8, 0.0), "ratio=0.0"),
        (lambda: ops.topk_decode(torch.ones(8).byte(), 8, 0.1), "payloads: "),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(ValueError, match=message), torch._subclasses.FakeTensorMode():
        call()
