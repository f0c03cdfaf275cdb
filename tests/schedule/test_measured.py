"""Slices of a step that really ran."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpasses.schedule.measured import record
from fxpasses.schedule.timeline import Slice, write_trace
from tests.graphs import mlp
from tests.multirank import run_ranks


def profiled(rank: int, compression: str) -> list[Slice]:
    torch.manual_seed(0)
    model = mlp(64, 128, 128, 64)
    options = {"bucket_mb": 0.05, "compression": compression}
    compiled = torch.compile(model, backend="hardened_aot_eager", options=options)
    x = torch.randn(32, 64)

    def step() -> None:
        compiled(x).square().sum().backward()

    step()
    return record(step)


@pytest.mark.parametrize(("compression", "codecs"), [("none", 0), ("int8", 2)])
def test_what_was_sent_waited_for_and_decoded(compression, codecs, tmp_path):
    ranks = run_ranks(profiled, 2, compression)
    for slices in ranks:
        kinds = [s.kind for s in slices]
        sent = kinds.count("link")
        assert sent == kinds.count("launch") == kinds.count("wait") == 2
        assert kinds.count("codec") == codecs * sent
        assert kinds.count("compute") == 3 + 5  # forward; backward, without the input's gradient
        assert [s.start for s in slices] == sorted(s.start for s in slices)
        assert all(s.duration >= 0 for s in slices) and slices[0].start >= 0
        assert [s.bucket for s in slices if s.kind == "link"] == [0, 1]
        last_launch = max(s.start for s in slices if s.kind == "launch")
        assert last_launch < min(s.start for s in slices if s.kind == "wait")
    write_trace(tmp_path / "t.json", dict(enumerate(ranks)), "measured")
    assert (tmp_path / "t.json").stat().st_size > 1000


def test_one_rank_only_computes():
    model = nn.Linear(8, 8)
    slices = record(lambda: model(torch.ones(2, 8)).sum().backward())
    assert {s.kind for s in slices} == {"compute"}


def test_a_step_of_nothing_has_no_slices():
    assert record(lambda: None) == []
