"""`fxpasses verify`, driven as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from fxpasses.cli import main

SOURCE = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.ones(6, 8),)


def whole_step():
    def step(model, x):
        model(x).square().mean().backward()

    model, args = net()
    return step, (model, *args)


class Branches(nn.Module):
    example_inputs = (torch.ones(6, 8),)

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y * 2, (self.a(x),))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with models in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", *arguments])


def test_thresholds_decide():
    words = ["--recovery", "own.py:net", "-o", "guards=all", "--world", "2", "--threshold"]
    done = run(*words, "0.6")
    assert done.exit_code == 0, done.output
    assert "rank0/g0.joint" in done.output and "rank0/g0.backward" in done.output
    assert "unguarded forward: relu" in done.output and "FAILS" not in done.output
    failed = run(*words, "0.61")
    assert failed.exit_code == 1 and failed.output.count("FAILS") == 1
    assert run("--recovery", "own.py:net", "-o", "guards=all").exit_code == 1  # 0.92


def test_json():
    done = run("--recovery", "own.py:Branches", "--world", "1", "--threshold", "0", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["threshold"] == 0
    joint, backward = found["graphs"]
    assert (joint["graph"], backward["graph"]) == ("rank0/g0.joint", "rank0/g0.backward")
    assert joint["connectivity"] == 1.0 and joint["unreachable"] == []
    assert {"true_graph_0", "false_graph_0"} < set(joint["blocks"])
    (of_sin,) = [u for u in joint["unguarded"] if u["path"][0]["operator"] == "sin"]
    assert of_sin["path"][0]["block"] == "true_graph_0"
    assert of_sin["path"][0]["model_line"].endswith("own.py:26")


def test_a_whole_step_is_one_graph():
    words = ["--recovery", "own.py:whole_step", "-o", "guards=all", "--world", "2", "--json"]
    (graph,) = json.loads(run(*words).output)["graphs"]
    assert graph["graph"] == "rank0/g0.backward"
    exits = [name for name in graph["blocks"] if name.startswith("exit")]
    # Products of the forward, of the backward; a payload; two biases' sums; the bits of four gradients.
    assert len(exits) == 2 + 3 + 1 + 2 + 4
    assert "addmm" not in {u["path"][0]["operator"] for u in graph["unguarded"]}


def test_an_exported_program(folder):
    module = torch.nn.Linear(8, 4)
    torch.export.save(torch.export.export(module, (torch.ones(2, 8),)), folder / "net.pt2")
    done = run("--recovery", "net.pt2", "--threshold", "1")
    assert done.exit_code == 0, done.output  # nothing is updated
    assert "rank0/g0.exported" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own.py:net"], "expected --recovery"),
        (["--recovery", "own.py:nothing"], "own.py has no 'nothing'"),
        (["--recovery", "own.py:net", "-o", "guards=prodcuts"], "option 'guards'"),
        (["--recovery", "own.py:net", "--threshold", "92"], "--threshold"),
        (["--recovery", "own.py:net", "--world", "0"], "--world"),
    ],
)
def test_errors_of_the_user(words, said):
    done = run(*words)
    assert done.exit_code == 2 and said in done.output
    assert "Traceback" not in done.output
