"""16-bit payloads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from custom_ops import wire16 as ops
from custom_ops.layout import Layout16
from tests.custom_ops.buckets import FLT_MAX, drawn, on_both, values

LAYOUTS = st.builds(
    Layout16,
    st.sampled_from((0, 1, 15, 16, 17, 100, 1000)),
    st.integers(1, 4),
    st.sampled_from(("fp16", "bf16")),
)


def encoded(flat: torch.Tensor, layout: Layout16) -> torch.Tensor:
    return on_both(ops.encode16, flat, *layout.fields)


def mean(payloads: list[torch.Tensor], layout: Layout16) -> torch.Tensor:
    return on_both(ops.decode16, torch.stack(payloads), *layout.fields)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("gradient", [40000.0, -40000.0, 2.0**-24, 65504.0, 0.0])
def test_four_ranks_neither_overflow_nor_vanish(gradient, dtype):
    layout = Layout16(100, 4, dtype)
    flat = (
        torch.full((100,), gradient)
        .to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        .float()
    )
    payloads = torch.stack([encoded(flat, layout)] * 4)
    pieces = payloads.view(4, 4, -1).transpose(0, 1).contiguous()
    shard = (layout.shard_numel, 1, dtype)
    own = [on_both(ops.encode16, on_both(ops.decode16, p, *shard), *shard) for p in pieces]
    assert torch.equal(mean([torch.cat(own)], layout), flat)


def test_large_and_small_in_one_bucket():
    layout = Layout16(2)
    flat = torch.tensor([40000.0, 2.0**-24])
    assert torch.equal(mean([encoded(flat, layout)] * 4, layout), flat)


@drawn
def test_error(data):
    layout = data.draw(LAYOUTS)
    flat = data.draw(values(layout.numel))
    back = mean([encoded(flat, layout)], layout).double()
    for shard in range(layout.shards):
        part = slice(shard * layout.shard_numel, (shard + 1) * layout.shard_numel)
        exact = flat[part].double()
        largest = exact.abs().max().clamp(min=2.0**-84) if len(exact) else 0
        relative, absolute = (
            (2.0**-11, 2.0**-39) if layout.dtype == "fp16" else (2.0**-8, 2.0**-108)
        )
        smallest = torch.as_tensor(absolute * largest).clamp(min=2.0**-134)
        bound = torch.maximum(relative * exact.abs(), smallest)
        assert ((back[part] - exact).abs() <= bound).all()


@drawn
def test_mean_of_ranks(data):
    layout = data.draw(LAYOUTS)
    flats = [data.draw(values(layout.numel)) for _ in range(data.draw(st.integers(1, 5)))]
    payloads = [encoded(flat, layout) for flat in flats]
    each = torch.stack([mean([payload], layout) for payload in payloads]).double()
    tolerance = 2.0**-22 * each.abs().amax(0) + 2.0**-145
    assert ((mean(payloads, layout).double() - each.mean(0)).abs() <= tolerance).all()


@drawn
def test_one_bad_number_marks_every_piece(data):
    layout = Layout16(
        100, data.draw(st.integers(1, 4)), data.draw(st.sampled_from(("fp16", "bf16")))
    )
    good = torch.randn(100)
    bad = good.clone()
    bad[data.draw(st.integers(0, 99))] = data.draw(st.sampled_from((math.nan, math.inf, -math.inf)))
    payload = encoded(bad, layout)
    assert not payload.view(layout.shards, -1)[:, 0].any()
    assert mean([encoded(good, layout), payload], layout).isnan().all()


@drawn
def test_damaged_payloads_are_decoded_alike(data):
    layout = data.draw(LAYOUTS)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    payloads = torch.randint(256, (2, layout.payload_bytes), generator=generator).to(torch.uint8)
    payloads[:, :: max(layout.piece_bytes, 1)] = 1
    payloads[:, 1 :: max(layout.piece_bytes, 1)] %= 100  # an exponent that is ever written
    on_both(ops.decode16, payloads, *layout.fields)


@pytest.mark.parametrize("first", [1, 2, 4])
def test_payloads_begin_anywhere(first):
    """Kernels read words of 8 bytes."""
    layout = Layout16(20, 2)
    payload = encoded(torch.randn(20), layout)
    memory = torch.zeros(first + len(payload)).byte()
    memory[first:] = payload
    assert memory[first:].data_ptr() % 8
    found = ops.decode16(memory[first:][None], *layout.fields)
    assert torch.equal(found, mean([payload], layout))


def test_the_mean_of_the_largest_numbers():
    layout = Layout16(3, dtype="bf16")
    flat = torch.tensor([FLT_MAX, -FLT_MAX, 1.0])
    result = mean([encoded(flat, layout)] * 3, layout)
    assert result.isfinite().all() and (result[0] > 0.99 * FLT_MAX)


def test_schema_and_fake():
    layout = Layout16(20, 2, "bf16")
    payload = ops.encode16(torch.randn(20), *layout.fields)
    torch.library.opcheck(torch.ops.fxpasses.encode16.default, (torch.randn(20), *layout.fields))
    torch.library.opcheck(torch.ops.fxpasses.decode16.default, (payload[None], *layout.fields))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.encode16(torch.ones(7), 8, 1, "fp16"), r"flat: .*\[8\].*\[7\]"),
        (lambda: ops.encode16(torch.ones(8), 8, 1, "int8"), "dtype='int8'"),
        (lambda: ops.decode16(torch.ones(8).byte(), 8, 1, "fp16"), "payloads: "),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(ValueError, match=message), torch._subclasses.FakeTensorMode():
        call()
