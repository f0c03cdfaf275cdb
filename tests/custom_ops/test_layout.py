"""Payload sizes, by counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from custom_ops.layout import CHUNK, HEADER_BYTES, Layout, Layout16, TopKLayout
from tests.custom_ops.buckets import layouts


@given(layouts())
def test_segments_cover_the_bucket_in_order(layout):
    at = 0
    for segment in layout.segments:
        assert segment.start == at and segment.length > 0
        assert segment.start // layout.shard_numel == segment.shard
        assert (segment.start + segment.length - 1) // layout.shard_numel == segment.shard
        at += segment.length
    assert at == layout.numel <= layout.shards * layout.shard_numel


@given(layouts())
def test_nothing_in_a_piece_overlaps(layout):
    ends = dict.fromkeys(range(layout.shards), (0, 0))
    for segment in layout.segments:
        groups, codes = ends[segment.shard]
        assert (segment.group, segment.code) == (groups, codes)
        for start in range(0, segment.length, layout.group):
            length = min(layout.group, segment.length - start)
            groups, codes = groups + 1, codes + -(-length * layout.bits // 8)
        ends[segment.shard] = groups, codes
    assert layout.groups == max(groups for groups, _ in ends.values())
    used = layout.codes_offset + max(codes for _, codes in ends.values())
    assert used <= layout.piece_bytes < used + 8
    assert layout.codes_offset == HEADER_BYTES + layout.groups * (2 if layout.symmetric else 3)


@pytest.mark.parametrize(
    ("bits", "symmetric", "cost"), [(8, True, 1 + 2 / 128), (4, True, 0.5 + 2 / 128)]
)
@pytest.mark.parametrize("shards", [1, 4])
def test_bytes_per_element_of_a_large_bucket(bits, symmetric, cost, shards):
    layout = Layout((2**20, 1000, 2**20 + 1), shards, bits, symmetric=symmetric)
    assert layout.payload_bytes == pytest.approx(cost * layout.numel, rel=2e-4)


@given(st.integers(0, 5 * CHUNK), st.sampled_from((1e-9, 0.01, 0.5, 1.0)))
def test_quotas_of_chunks(numel, ratio):
    layout = TopKLayout(numel, ratio)
    quotas = [layout.quota(chunk) for chunk in range(layout.chunks)]
    assert sum(layout.chunk_numel(chunk) for chunk in range(layout.chunks)) == numel
    assert sum(quotas) == layout.entries
    assert all(1 <= quota <= layout.chunk_numel(c) for c, quota in enumerate(quotas))
    assert layout.payload_bytes - HEADER_BYTES - 4 * layout.entries in range(8)


def test_a_ratio_that_floats_do_not_hold():
    assert TopKLayout(10, 0.1).quota(0) == 1
    assert TopKLayout(CHUNK, 0.01).quota(0) == 656


def test_fields_stand_for_the_layout():
    layout = Layout((3, 4), 2, 4, 64, False, True)
    assert Layout(*layout.fields) == layout
    assert Layout16(*Layout16(5, 2, "bf16").fields) == Layout16(5, 2, "bf16")
    assert TopKLayout(*TopKLayout(5, 0.1).fields) == TopKLayout(5, 0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout((4,), bits=3), "bits=3: expected 4 or 8"),
        (lambda: Layout((4,), group=100), "group=100: expected a power of two"),
        (lambda: Layout((4,), group=0), "group=0"),
        (lambda: Layout((4, -1)), r"lengths=\[4, -1\]"),
        (lambda: Layout((4,), shards=0), "shards=0"),
        (
            lambda: Layout((4,), group=16, rotate=True),
            "rotate=True needs .* 32 elements, got group=16",
        ),
        (lambda: Layout16(4, dtype="fp32"), "dtype='fp32': expected 'fp16' or 'bf16'"),
        (lambda: Layout16(-1), "numel=-1"),
        (lambda: Layout16(4, 65_536), "shards=65536: expected at most 65535"),
        (lambda: TopKLayout(4, 0.0), r"ratio=0.0: expected a number in \(0, 1\]"),
        (lambda: TopKLayout(4, 1.5), "ratio=1.5"),
        (lambda: TopKLayout(4, float("nan")), "ratio=nan"),
        (lambda: TopKLayout(-1), "numel=-1"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
