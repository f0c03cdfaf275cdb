"""Damaged payloads are found, and whose they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from custom_ops import checksum as ops
from tests.custom_ops.buckets import drawn, on_both

RANKS, PIECES, BYTES = 3, 2, 80


def sealed() -> torch.Tensor:
    payloads = torch.randint(256, (RANKS, BYTES), generator=torch.Generator().manual_seed(0)).byte()
    return torch.stack([on_both(ops.seal, payload, PIECES) for payload in payloads])


def test_only_the_checksums_are_written():
    payload = torch.randint(256, (BYTES,)).byte()
    after = on_both(ops.seal, payload, PIECES).view(PIECES, -1)
    assert torch.equal(after[:, :4], payload.view(PIECES, -1)[:, :4])
    assert torch.equal(after[:, 8:], payload.view(PIECES, -1)[:, 8:])
    assert not on_both(ops.broken, after.view(1, -1), PIECES).any()


@drawn
def test_a_burst_of_bits_is_found(data):
    payloads = sealed()
    rank = data.draw(st.integers(0, RANKS - 1))
    first = data.draw(st.integers(0, 8 * BYTES - 1))
    length = data.draw(st.integers(1, min(32, 8 * BYTES // 2 - first % (8 * BYTES // 2))))
    for bit in {
        first,
        first + length - 1,
        *data.draw(st.sets(st.integers(first, first + length - 1))),
    }:
        payloads[rank, bit // 8] ^= 1 << bit % 8
    assert on_both(ops.broken, payloads, PIECES).tolist() == [r == rank for r in range(RANKS)]


def test_nothing_but_zeros_is_broken():
    assert on_both(ops.broken, torch.zeros(2, BYTES).byte(), PIECES).all()


def test_schema_and_fake():
    torch.library.opcheck(torch.ops.fxpasses.seal.default, (torch.ones(BYTES).byte(), PIECES))
    torch.library.opcheck(torch.ops.fxpasses.broken.default, (sealed(), PIECES))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.seal(torch.ones(BYTES).byte(), 3), r"pieces=3: .*\[1, 80\]"),
        (lambda: ops.seal(torch.ones(BYTES).byte(), 0), "pieces=0"),
        (lambda: ops.seal(torch.ones(BYTES), 1), "torch.float32"),
        (lambda: ops.broken(torch.ones(BYTES).byte(), 1), "pieces=1"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(ValueError, match=message), torch._subclasses.FakeTensorMode():
        call()
