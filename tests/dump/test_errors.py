"""How much passes change results."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fxpasses.cli import main
from fxpasses.dump.errors import Errors
from fxpasses.observers import GraphName
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.pipeline import Pipeline
from fxpasses.rewrite import splice
from fxpasses.trace import trace
from tests.golden.model import TwoHeads
from tests.graphs import ANY_ORIGIN, Does, doubled


def measured(world: int, **options: object) -> dict[str, float]:
    """By pass."""
    errors, names = Errors(), {}

    def watch(name: GraphName) -> list:
        def note(previous, following, graph) -> None:
            if previous is not None:
                names[str(name), previous.number] = previous.made_by.name

        return [errors.watch(name), note]

    for rank in range(world):
        torch.manual_seed(0)
        trace(TwoHeads(), (torch.ones(3, 4),), options, world=world, rank=rank, watcher=watch)
    return {names[key]: value for key, value in errors.measured().items()}


def test_a_change_is_relative_to_the_largest_element():
    def act(graph) -> Report:
        (gradient,) = graph.gradients()
        args = {"name": "off", "provenance": ANY_ORIGIN}
        graph.set_output(
            0, splice(graph, graph.output_node, lambda x: x * 1.25, gradient.node, **args)
        )
        return Report(changed=True)

    errors = Errors()
    pipeline = Pipeline((Bucketing(mb=1), Does(action=act)))
    pipeline.run("backward", doubled((30,)), [errors.watch(GraphName(0, 0, "backward"))])
    assert errors.measured() == {
        ("rank0/g0.backward", 1): 0.0,
        ("rank0/g0.backward", 2): pytest.approx(0.25),
    }


def test_what_passes_cost_in_accuracy():
    found = measured(3, precision="bf16", compression={"scheme": "int8"})
    assert found["bucketing"] == 0.0
    assert 1e-4 < found["cast"] < 0.1
    assert 1e-5 < found["compress"] < 0.02


def test_dropout_is_no_change():
    errors = Errors()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    options = {"precision": "bf16"}
    trace(model, (torch.ones(3, 8),), options, watcher=lambda name: [errors.watch(name)])
    assert 0 < errors.measured()["rank0/g0.joint", 1] < 0.05


def test_a_reduction_is_compared_with_the_mean_or_sum():
    for reduce in ("mean", "sum"):
        assert measured(3, reduce=reduce)["gradient_sync"] < 1e-6


def test_all_ranks_have_to_be_seen():
    errors = Errors()
    trace(TwoHeads(), (torch.ones(3, 4),), world=2, watcher=lambda name: [errors.watch(name)])
    with pytest.raises(ValueError, match="need the graphs of all 2 ranks, and 1 ran here"):
        errors.measured()


def test_the_command_tells_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Linear(8, 2), torch.ones(3, 8)\n"
    )
    command = [
        "dump",
        "own.py:make",
        "-o",
        "precision=bf16",
        "--errors",
        "--json",
        "--html",
        "page.html",
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    joint, backward, *others = json.loads(result.output)["graphs"]
    assert [g["name"] for g in others] == ["rank1/g0.joint", "rank1/g0.backward"]
    assert 0 < joint["passes"][0]["error"] < 0.1
    by_name = {p["pass"].split("{")[0]: p.get("error") for p in backward["passes"]}
    assert by_name["bucketing"] == 0.0 and by_name["participation"] is None
    assert '"error":' in (tmp_path / "page.html").read_text()
