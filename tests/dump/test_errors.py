"""How much passes change results."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fxpasses.cli import main
from fxpasses.dump.errors import Difference, Errors
from fxpasses.observers import GraphName
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.pipeline import Pipeline
from fxpasses.rewrite import splice
from fxpasses.trace import trace
from tests.golden.model import TwoHeads
from tests.graphs import ANY_ORIGIN, Does, doubled


def measured(world: int, **options: object) -> dict[str, Difference]:
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


def times(factor: float, name: str) -> Does:
    """A pass of this name that multiplies the gradient."""

    def act(graph) -> Report:
        (gradient,) = graph.gradients()
        args = {"name": "off", "provenance": ANY_ORIGIN}
        graph.set_output(
            0, splice(graph, graph.output_node, lambda x: x * factor, gradient.node, **args)
        )
        return Report(changed=True)

    return dataclasses.dataclass(frozen=True)(type("Named", (Does,), {"name": name}))(act)


def test_differences_are_relative_to_the_largest_element_and_errors_add_up():
    errors = Errors()
    pipeline = Pipeline((Bucketing(mb=1), times(1.25, "more"), times(0.8, "less")))
    pipeline.run("backward", doubled((30,)), [errors.watch(GraphName(0, 0, "backward"))])
    first, second, third = errors.measured().values()
    assert (first.change, first.error) == (0.0, 0.0)
    assert (second.change, second.error) == pytest.approx((0.25, 0.25))
    assert (third.change, third.error) == pytest.approx((0.2, 0.0), abs=1e-6)


def test_what_passes_cost_in_accuracy():
    found = measured(3, precision="bf16", compression={"scheme": "int8"})
    assert found["bucketing"].change == 0.0
    assert 1e-4 < found["cast"].change < 0.1
    assert 1e-5 < found["compress"].change < 0.02


def test_errors_are_against_the_program_in_fp32():
    low = measured(2, precision="bf16")
    assert low["cast"].error == low["cast"].change
    assert 1e-4 < low["bucketing"].error <= low["cast"].error  # type: ignore[operator]
    assert low["gradient_sync"].error > 1e-4 and low["gradient_sync"].change < 1e-6  # type: ignore[operator]
    full = measured(2)
    assert full["bucketing"].error < 1e-6 and full["gradient_sync"].error < 1e-6  # type: ignore[operator]


def test_a_clipped_gradient_is_far_from_the_programs():
    found = measured(1, precision="bf16", clip_norm=1e-9)
    assert found["clip_norm"].error == pytest.approx(1.0, abs=1e-3)


def test_a_loss_scale_costs_nothing():
    found = measured(1, precision="fp16", loss_scale="dynamic")
    assert found["loss_scale"].change < 1e-3
    assert found["overflow"].change == 0.0


def test_nan_is_the_largest_difference():
    errors = Errors()
    pipeline = Pipeline((Bucketing(mb=1), times(math.nan, "nothing")))
    pipeline.run("backward", doubled((30,)), [errors.watch(GraphName(0, 0, "backward"))])
    _, last = errors.measured().values()
    assert math.isnan(last.change) and last.data() == {"change": "nan", "error": "nan"}


def test_without_the_joint_graph_the_error_is_unknown():
    errors = Errors()

    def watch(name: GraphName) -> list:
        return [errors.watch(name)] if name.graph == "backward" else []

    trace(TwoHeads(), (torch.ones(3, 4),), {"clip_norm": 1.0}, watcher=watch)
    (difference,) = errors.measured().values()
    assert difference.error is None and difference.change > 0


def test_dropout_is_no_change():
    errors = Errors()
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    options = {"precision": "bf16"}
    trace(model, (torch.ones(3, 8),), options, watcher=lambda name: [errors.watch(name)])
    assert 0 < errors.measured()["rank0/g0.joint", 1].change < 0.05


def test_a_reduction_is_compared_with_the_mean_or_sum():
    for reduce in ("mean", "sum"):
        assert measured(3, reduce=reduce)["gradient_sync"].change < 1e-6


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
    by_name = {p["pass"].split("{")[0]: p.get("change") for p in backward["passes"]}
    assert by_name["bucketing"] == 0.0 and by_name["participation"] is None
    assert '"error":' in (tmp_path / "page.html").read_text()
