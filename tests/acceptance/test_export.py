"""Case 33: an exported program through the command line, and back into a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fxpasses.cli import main
from fxpasses.exported import output_kinds

BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
SPECS = {
    True: [*(("BUFFER_MUTATION", name) for name in BUFFERS), ("USER_OUTPUT", None)],
    False: [("USER_OUTPUT", None)],
}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).exp().sum()


@pytest.mark.parametrize("decomposed", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_case_33_output_specs_and_mode_stay(tmp_path: Path, monkeypatch, train, decomposed):
    program = torch.export.export(Normed().train(train), (torch.randn(4, 2),))
    source, target = tmp_path / "program.pt2", tmp_path / "low.pt2"
    torch.export.save(program.run_decompositions() if decomposed else program, source)

    def refuse(*args: object) -> None:
        raise AssertionError("the mode of an exported program can't be changed")

    monkeypatch.setattr(nn.Module, "eval", refuse)
    monkeypatch.setattr(nn.Module, "train", refuse)
    arguments = ["dump", str(source), "cast{dtype=bf16}", "--output", str(target)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    monkeypatch.undo()

    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"specialised: {'train' if train else 'eval'}"
    said = [f"output spec: {kind} {name or ''}".rstrip() for kind, name in SPECS[train]]
    assert lines[-len(said) :] == said
    assert (
        result.output.count("def forward(") == 2
        and "after cast{dtype=bf16,rules=}" in result.output
    )
    low = torch.export.load(target)
    assert output_kinds(low) == SPECS[train]
    x = torch.randn(4, 2)
    found, expected = low.module()(x), program.module()(x)
    assert found.dtype == expected.dtype and not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
