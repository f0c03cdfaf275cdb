"""Dumps of ranks, compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fxpasses.cli import main
from fxpasses.dump.folder import Dump
from fxpasses.dump.ranks import first_difference, ranks_in
from fxpasses.trace import trace
from tests.golden.model import TwoHeads


class OneHead(TwoHeads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class Squared(TwoHeads):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = super().forward(x)
        return left.square(), right


def dumped(folder: Path, models: list[nn.Module], batch: int = 3, **options: object) -> list[Path]:
    """One rank for each model."""
    world = len(models)
    for rank, model in enumerate(models):
        x = torch.ones(batch + rank, 4)
        trace(
            model, (x,), options, world=world, rank=rank, watcher=lambda n: [Dump(folder / str(n))]
        )
    return ranks_in(folder)


def test_ranks_that_do_the_same(tmp_path):
    """Batches and shards are each rank's own."""
    models = [TwoHeads() for _ in range(3)]
    folders = dumped(tmp_path, models, compression="int8")
    assert [f.name for f in folders] == ["rank0", "rank1", "rank2"]
    assert first_difference(folders) is None


def test_a_collective_that_differs(tmp_path):
    wide = TwoHeads()
    wide.left = nn.Linear(8, 5)
    found = first_difference(dumped(tmp_path, [TwoHeads(), wide]))
    assert (
        found is not None and found.where == "g0.backward/03-bucketing: node 1"
    ) or "collective" in found.where


def test_the_first_node_that_differs_is_named_with_its_line(tmp_path):
    found = first_difference(dumped(tmp_path, [TwoHeads(), Squared()]))
    assert found is not None
    where, what = found.where.split(": ")
    assert where == "g0.backward/00-input" and what.startswith("node ")
    sides = [side for _, side in found.sides]
    assert sides[0] != sides[1] and any("(tests/golden/model.py:" in side for side in sides)


def test_a_launch_of_another_size_comes_first(tmp_path):
    folders = dumped(tmp_path, [TwoHeads(), OneHead()])
    for folder in folders:  # as if nothing but the last moment had been written
        for path in folder.rglob("*.json"):
            if "gradient_sync" not in path.name:
                path.unlink()
    found = first_difference(folders)
    assert found is not None and found.where == "g0.backward/04-gradient_sync: collective 2"
    sides = [side for _, side in found.sides]
    assert all("torch.ops._c10d_functional." in side for side in sides)
    assert sides[0] != sides[1] and any("(tests/" in side for side in sides)


def test_a_graph_that_a_rank_lacks(tmp_path):
    models = [TwoHeads(), TwoHeads().requires_grad_(False)]
    folders = dumped(tmp_path, models, precision="bf16")
    found = first_difference(folders)
    assert found is not None and found.where == "g0.backward/00-input"
    assert dict(found.sides) == {str(folders[0]): "there", str(folders[1]): "missing"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["same"], 0, "2 ranks do the same"),
        (["same/rank0", "same/rank1"], 0, "2 ranks do the same"),
        (["other"], 1, "g0.backward/00-input: node "),
        (["same/rank0"], 2, "holds no dump"),
        (["same/rank0", "nowhere"], 2, "nowhere: holds no dump"),
    ],
)
def test_the_command(tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    dumped(Path("same"), [TwoHeads(), TwoHeads()])
    dumped(Path("other"), [TwoHeads(), Squared()])
    result = CliRunner().invoke(main, ["dump", "--compare-ranks", *arguments])
    assert result.exit_code == code and message in result.output, result.output
