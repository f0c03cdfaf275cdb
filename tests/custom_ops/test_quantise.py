"""Quantisers: the compiled kernels against the reference, and both against what is promised."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from custom_ops import quantise as ops
from custom_ops.layout import HADAMARD, Layout
from tests.custom_ops.buckets import FLT_MAX, drawn, groups, layouts, on_both, scales, seeds, values

SLACK = 1 + 2.0**-14
SMALLEST_SCALE = 2.0**-100


def decoded(payload: torch.Tensor, layout: Layout) -> torch.Tensor:
    return on_both(ops.dequantise, payload[None], *layout.fields)


def encoded(flat: torch.Tensor, layout: Layout, seed: torch.Tensor | None = None) -> torch.Tensor:
    return on_both(ops.quantise, flat, None, seed, *layout.fields)[0]


def largest_of_group(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[n] fp64: the largest magnitude of each element's group."""
    group = groups(layout)
    found = (
        torch.zeros(len(group) + 1).double().scatter_reduce(0, group, flat.abs().double(), "amax")
    )
    return found[group]


@drawn
def test_error_is_half_a_scale(data):
    layout = data.draw(layouts(rotate=False))
    flat = data.draw(values(layout.numel))
    payload = encoded(flat, layout)
    error = (decoded(payload, layout).double() - flat.double()).abs()
    scale = scales(payload, layout)
    assert (error <= scale / 2 * SLACK).all()
    # The scale is no larger than it has to be: one bf16 above the span over the steps.
    largest = largest_of_group(flat, layout)
    steps = 2**layout.bits - 2
    assert (
        scale <= (2 * largest / steps * (1 + 2.0**-7) * (1 + 2.0**-15)).clamp(min=SMALLEST_SCALE)
    ).all()


@drawn
def test_order_is_kept_within_a_group(data):
    layout = data.draw(layouts(rotate=False, lengths=(100,), shards=1))
    flat = data.draw(values(100))
    group = groups(layout)
    back = decoded(encoded(flat, layout), layout)
    for index in range(int(group.max()) + 1):
        order = flat[group == index].argsort()
        assert (back[group == index][order].diff() >= 0).all()


@drawn
def test_positive_and_negative_values_are_alike(data):
    layout = data.draw(layouts(symmetric=True))
    flat = data.draw(values(layout.numel))
    there, back = encoded(flat, layout), encoded(-flat, layout)
    assert torch.equal(decoded(there, layout), -decoded(back, layout))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_maximum_uses_the_last_code(bits, sign):
    """Not 7/8 of it, as with a scale of 2^bits / (2 max) and a clamp."""
    layout = Layout((128,), bits=bits)
    flat = sign * torch.linspace(-0.5, 1.0, 128)
    back = decoded(encoded(flat, layout), layout)
    assert back[-1].item() == pytest.approx(sign, rel=2.0**-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_one_sided_groups_have_twice_the_resolution_with_a_zero_point(bits):
    flat = torch.rand(128, generator=torch.Generator().manual_seed(0)) + 1
    symmetric, affine = (Layout((128,), bits=bits, symmetric=s) for s in (True, False))
    ratio = scales(encoded(flat, affine), affine) / scales(encoded(flat, symmetric), symmetric)
    assert (ratio <= 0.5 * (1 + 2.0**-7)).all()


@drawn
def test_what_is_not_sent_stays_in_the_residual(data):
    layout = data.draw(layouts())
    flat, residual = data.draw(values(layout.numel)), data.draw(values(layout.numel))
    total = flat + residual
    payload, lost = on_both(ops.quantise, flat, residual, data.draw(seeds), *layout.fields)
    if total.isfinite().all():
        sent = decoded(payload, layout)
        unrounded = total.double() - sent.double()
        assert torch.equal(lost, unrounded.float())
    else:
        assert torch.equal(lost, residual)
        assert decoded(payload, layout).isnan().all()


@drawn
def test_stochastic_rounding_takes_a_neighbour(data):
    layout = data.draw(layouts(rotate=False))
    flat = data.draw(values(layout.numel))
    seed = data.draw(st.integers(-(2**63), 2**63 - 1).map(torch.tensor))
    payload = encoded(flat, layout, seed)
    error = (decoded(payload, layout).double() - flat.double()).abs()
    assert (error <= scales(payload, layout) * SLACK).all()
    assert torch.equal(payload, encoded(flat, layout, seed))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_right_on_average(bits, symmetric):
    layout = Layout((512,), bits=bits, symmetric=symmetric)
    flat = torch.randn(512, generator=torch.Generator().manual_seed(0))
    count = 1000
    payloads = [
        ops.quantise(flat, None, torch.tensor(seed), *layout.fields)[0] for seed in range(count)
    ]
    mean = ops.dequantise(torch.stack(payloads), *layout.fields)
    deviations = (mean - flat) / scales(payloads[0], layout).float() * math.sqrt(count)
    # Of one draw at most half a scale. Elements, seeds and their hashes are independent.
    assert deviations.abs().max() < 0.5 * 5
    assert abs(deviations.sum().item()) < 0.5 * math.sqrt(512) * 4
    nearest = decoded(encoded(flat, layout), layout)
    assert (mean - flat).abs().mean() < 0.1 * (nearest - flat).abs().mean()


def test_draws_of_seeds_and_elements_are_unrelated():
    layout = Layout((4096,))
    flat = torch.full((4096,), 0.4)
    flat[::128] = 127.0  # scales of about 1: 0.4 is rounded up now and then
    draws = torch.stack(
        [decoded(encoded(flat, layout, torch.tensor(seed)), layout) for seed in (1, 2, 2**40, -1)]
    )
    draws = (draws[:, flat < 1] > 0).double()
    assert (draws.mean(1) - 0.4).abs().max() < 0.04
    assert (torch.corrcoef(draws) - torch.eye(4)).abs().max() < 0.06
    follow = torch.corrcoef(torch.stack([draws[0, :-1], draws[0, 1:]]))
    assert follow[0, 1].abs() < 0.06


@drawn
def test_rotated_error(data):
    layout = data.draw(layouts(rotate=True))
    flat = data.draw(values(layout.numel))
    payload = encoded(flat, layout)
    error = (decoded(payload, layout).double() - flat.double()).abs()
    rounding = 2.0**-20 * largest_of_group(flat, layout)
    assert (error <= HADAMARD / 2 * scales(payload, layout) * SLACK + rounding).all()


def test_rotation_helps_where_there_are_outliers():
    flat = torch.randn(2**14, generator=torch.Generator().manual_seed(0))
    flat[::128] *= 30
    errors = []
    for rotate in (True, False):
        layout = Layout((2**14,), bits=4, rotate=rotate)
        errors.append((decoded(encoded(flat, layout), layout) - flat).square().mean())
    assert errors[0] < 0.5 * errors[1]


@drawn
def test_one_bad_number_marks_every_piece(data):
    layout = data.draw(layouts(lengths=(100, 7, 300)))
    flat = torch.randn(407)
    flat[data.draw(st.integers(0, 406))] = data.draw(
        st.sampled_from((math.nan, math.inf, -math.inf))
    )
    residual = torch.randn(407)
    payload, lost = on_both(ops.quantise, flat, residual, None, *layout.fields)
    assert torch.equal(lost, residual)
    assert not payload.view(layout.shards, -1)[:, 0].any()
    good = encoded(torch.ones(407), layout)
    mean = on_both(ops.dequantise, torch.stack([good, payload]), *layout.fields)
    assert mean.isnan().all()
    for shard in range(layout.shards):
        pieces = torch.stack([good, payload]).view(2, layout.shards, -1)[:, shard].contiguous()
        owner = torch.randn(layout.shard_numel)
        piece, kept = on_both(ops.requantise, pieces, owner, None, shard, 8, *layout.fields)
        assert piece[0] == 0 and torch.equal(kept, owner)


@drawn
def test_an_exchange_of_shards(data):
    """W ranks: quantise, exchange shards, mean and quantise again at the owner, gather, decode."""
    layout = data.draw(layouts(rotate=False))
    world, out_bits = layout.shards, data.draw(st.sampled_from((4, 8)))
    flats = [data.draw(values(layout.numel)) / 4 for _ in range(world)]
    residuals = torch.zeros(world, layout.shard_numel)
    residuals.view(-1)[: layout.numel] = data.draw(values(layout.numel)) / 2**20
    payloads = torch.stack([encoded(flat, layout) for flat in flats])

    pieces, kept = [], []
    for shard in range(world):
        arrived = payloads.view(world, world, layout.piece_bytes)[:, shard].contiguous()
        seed = data.draw(seeds)
        piece, lost = on_both(
            ops.requantise, arrived, residuals[shard], seed, shard, out_bits, *layout.fields
        )
        pieces.append(piece)
        kept.append(lost)
    out_layout = Layout(layout.lengths, world, out_bits, layout.group, layout.symmetric)
    gathered = torch.cat(pieces)
    result = decoded(gathered, out_layout)

    owner = residuals.view(-1)[: layout.numel].double()
    exact = torch.stack(flats).double().mean(0) + owner
    bound = sum(scales(payload, layout) for payload in payloads) / 2 / world
    rounding = 2.0**-20 * exact.abs() + 2.0**-149
    lost = torch.cat(kept)
    assert not lost[layout.numel :].any()
    sent = result.double() + lost[: layout.numel].double()
    assert ((sent - exact).abs() <= bound * SLACK + rounding).all()
    assert (lost[: layout.numel].abs() <= scales(gathered, out_layout) * SLACK).all()


@drawn
def test_mean_is_that_of_the_decoded_payloads(data):
    layout = data.draw(layouts(rotate=False))
    flats = [data.draw(values(layout.numel)) / 4 for _ in range(data.draw(st.integers(1, 5)))]
    payloads = torch.stack([encoded(flat, layout) for flat in flats])
    mean = on_both(ops.dequantise, payloads, *layout.fields).double()
    each = torch.stack([decoded(payload, layout) for payload in payloads]).double()
    tolerance = 2.0**-22 * each.abs().amax(0) + 2.0**-149
    assert ((mean - each.mean(0)).abs() <= tolerance).all()


@pytest.mark.parametrize("rotate", [True, False])
def test_the_mean_of_the_largest_numbers(rotate):
    layout = Layout((64,), rotate=rotate)
    payload = encoded(torch.full((64,), FLT_MAX), layout)
    mean = on_both(ops.dequantise, torch.stack([payload] * 4), *layout.fields)
    assert mean.isfinite().all() and (mean > 0.99 * FLT_MAX).all()


@drawn
def test_damaged_payloads_are_decoded_alike(data):
    layout = data.draw(layouts())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    payloads = torch.randint(256, (2, layout.payload_bytes), generator=generator).to(torch.uint8)
    payloads[:, :: layout.piece_bytes] = 1
    on_both(ops.dequantise, payloads, *layout.fields)


def test_a_group_may_be_far_larger_than_the_bucket():
    layout = Layout((5, 3), bits=4, group=2**40)
    flat = torch.arange(8.0)
    assert layout.payload_bytes == 24
    torch.testing.assert_close(decoded(encoded(flat, layout), layout), flat, rtol=0, atol=0.51)


def test_threads_change_nothing():
    layout = Layout((300_000, 33, 0, 9_999), shards=3, bits=4)
    flat, residual = torch.randn(layout.numel), torch.randn(layout.numel)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            payload, lost = ops.quantise(flat, residual, torch.tensor(3), *layout.fields)
            results.append((payload, lost, ops.dequantise(payload[None], *layout.fields)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU can't flush subnormals")
def test_flushing_subnormals_to_zero_changes_nothing():
    layout = Layout((100, 100, 100))
    flat = torch.cat([torch.randn(100) * scale for scale in (1e-39, 1e-37, 1)])
    payload = ops.quantise(flat, None, None, *layout.fields)[0]
    back = ops.dequantise(payload[None], *layout.fields)
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(ops.quantise(flat, None, None, *layout.fields)[0], payload)
        assert torch.equal(ops.dequantise(payload[None], *layout.fields), back)
    finally:
        torch.set_flush_denormal(False)


def arguments(name: str) -> tuple:
    layout = Layout((70, 0, 1), shards=2, bits=4)
    flat, residual = torch.randn(71), torch.randn(71)
    payload = ops.quantise(flat, None, None, *layout.fields)[0]
    pieces = payload.view(2, -1)
    return {
        "quantise": (flat, None, None, *layout.fields),
        "quantise with feedback": (flat, residual, torch.tensor(5), *layout.fields),
        "dequantise": (payload[None], *layout.fields),
        "requantise": (pieces, None, None, 1, 8, *layout.fields),
        "requantise with feedback": (
            pieces,
            torch.randn(48),
            torch.tensor(1),
            0,
            4,
            *layout.fields,
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    ["quantise", "quantise with feedback", "dequantise", "requantise", "requantise with feedback"],
)
def test_schema_and_fake(name):
    torch.library.opcheck(getattr(torch.ops.fxpasses, name.split()[0]).default, arguments(name))


@pytest.mark.inductor
def test_in_a_compiled_graph():
    layout = Layout((70, 0, 1), bits=4)

    def exchange(flat, residual):
        payload, lost = torch.ops.fxpasses.quantise(flat * 2, residual, None, *layout.fields)
        return torch.ops.fxpasses.dequantise(torch.stack([payload, payload]), *layout.fields), lost

    args = torch.randn(71), torch.randn(71)
    compiled = torch.compile(exchange, fullgraph=True)(*args)
    assert all(map(torch.equal, compiled, exchange(*args)))


LAYOUT = Layout((6, 2), shards=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.quantise(torch.ones(7), None, None, *LAYOUT.fields), r"flat: .*\[8\].*\[7\]"),
        (lambda: ops.quantise(torch.ones(8).double(), None, None, *LAYOUT.fields), "torch.float64"),
        (lambda: ops.quantise(torch.ones(16)[::2], None, None, *LAYOUT.fields), "not contiguous"),
        (lambda: ops.quantise(torch.ones(8), torch.ones(9), None, *LAYOUT.fields), "residual: "),
        (lambda: ops.quantise(torch.ones(8), None, torch.ones(1), *LAYOUT.fields), "seed: .*int64"),
        (lambda: ops.quantise(torch.ones(8), None, None, [8], 1, 5, 128, True, False), "bits=5"),
        (lambda: ops.dequantise(torch.ones(8).byte(), *LAYOUT.fields), r"payloads: .*\[ranks, "),
        (
            lambda: ops.requantise(
                torch.zeros(2, LAYOUT.piece_bytes).byte(), None, None, 2, 8, *LAYOUT.fields
            ),
            "shard=2: expected one of the layout's 2",
        ),
        (
            lambda: ops.requantise(
                torch.zeros(2, LAYOUT.piece_bytes).byte(), None, None, 1, 6, *LAYOUT.fields
            ),
            "bits=6",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(ValueError, match=message), torch._subclasses.FakeTensorMode():
        call()
