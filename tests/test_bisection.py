"""Running a part of the passes, as the environment asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpasses import bisection
from fxpasses.bisection import Request
from fxpasses.graph import TrainingGraph
from fxpasses.observers import CheckRules
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.pipeline import Pipeline
from fxpasses.rewrite import Provenance, splice
from fxpasses.spec import SpecError
from fxpasses.trace import trace
from tests.golden.model import TwoHeads
from tests.graphs import WORLD, Does, doubled


@pytest.fixture(autouse=True)
def no_rewrites_yet() -> None:
    bisection._counts.clear()


def negate(graph: TrainingGraph) -> Report:
    """Each gradient by a rewrite of its own."""
    for gradient in graph.gradients():
        origin = Provenance("does", "negate", gradient.node.name, parameters=(gradient.parameter,))
        args = {"name": "negated", "provenance": origin}
        graph.set_output(
            gradient.index, splice(graph, graph.output_node, lambda x: -x, gradient.node, **args)
        )
    return Report(changed=True)


def asked(monkeypatch: pytest.MonkeyPatch, log: Path, **what: Any) -> Request:
    request = Request(str(log), **what)
    for name, value in request.environment().items():
        monkeypatch.setenv(name, value)
    return request


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def ran(graph: TrainingGraph, *passes: Any) -> list[str]:
    done = Pipeline(passes).run("backward", graph, [CheckRules()])
    return [d.made_by.name for d in done]


def test_nothing_is_asked_for(tmp_path):
    assert ran(doubled((3,)), Does(action=negate), Bucketing(mb=1)) == ["does", "bucketing"]


def test_all_passes_are_noted(monkeypatch, tmp_path):
    asked(monkeypatch, tmp_path / "log")
    assert ran(doubled((3,), (2,)), Does(action=negate), Bucketing(mb=1)) == ["does", "bucketing"]
    first, *rewrites = rows(tmp_path / "log")
    assert first["pipeline"] == ["does", "bucketing"]
    assert [row["made_by"] for row in rewrites] == ["does", "does", "bucketing", "bucketing"]
    assert rewrites[1]["rewrite"]["rule"] == "negate"
    assert rewrites[1]["rewrite"]["parameters"] == ["p1"]


def test_only_some_passes_run(monkeypatch, tmp_path):
    asked(monkeypatch, tmp_path / "log", passes=("bucketing",))
    assert ran(doubled((3,)), Does(action=negate), Bucketing(mb=1)) == ["bucketing"]
    asked(monkeypatch, tmp_path / "log", passes=())
    graph = doubled((3,))
    before = graph.fingerprint()
    assert ran(graph, Does(action=negate), Bucketing(mb=1)) == []
    assert graph.fingerprint() == before


@pytest.mark.parametrize("rewrites", [0, 1, 2, 3])
def test_a_pass_stops_half_way(monkeypatch, tmp_path, rewrites):
    asked(monkeypatch, tmp_path / "log", partial=("does", rewrites))
    graph = doubled((3,), (2,), (4,))
    assert ran(graph, Does(action=negate)) == ["does"]
    negated = [str(g.node.target) == "aten.neg.default" for g in graph.gradients()]
    assert negated == [i < rewrites for i in range(3)]


def test_rewrites_count_over_all_graphs_of_a_process(monkeypatch, tmp_path):
    asked(monkeypatch, tmp_path / "log", partial=("does", 3))
    graphs = [doubled((3,), (2,)) for _ in range(2)]
    for graph in graphs:
        ran(graph, Does(action=negate))
    counts = [sum("neg" in str(n.target) for n in g.walk()) for g in graphs]
    assert counts == [2, 1]


def test_a_graph_that_can_not_be_left_there_is_noted(monkeypatch, tmp_path, fake_world):
    asked(monkeypatch, tmp_path / "log", partial=("gradient_sync", 1))
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    with pytest.raises(SpecError):
        ran(doubled((3,)), Bucketing(mb=1), sync)
    assert "untestable" in rows(tmp_path / "log")[-1]


def test_an_error_of_another_pass_is_none_of_ours(monkeypatch, tmp_path):
    asked(monkeypatch, tmp_path / "log", partial=("bucketing", 0))
    with pytest.raises(SpecError, match="'does'"):
        ran(doubled((3,)), Does(action=lambda graph: None), Bucketing(mb=1))
    assert not any("untestable" in row for row in rows(tmp_path / "log"))


def test_a_pass_that_asks_can_be_stopped_anywhere(monkeypatch, tmp_path):
    def lowered(limit: int | None) -> int:
        bisection._counts.clear()
        partial = None if limit is None else ("cast", limit)
        asked(monkeypatch, tmp_path / "log", passes=("cast",), partial=partial)
        (tmp_path / "log").unlink(missing_ok=True)
        trace(TwoHeads(), (torch.ones(3, 4),), {"precision": "bf16"})  # checks the rules
        return sum(row.get("made_by") == "cast" for row in rows(tmp_path / "log"))

    everything = lowered(None)
    assert everything > 5
    assert [lowered(n) for n in range(everything + 1)] == list(range(everything + 1))
    assert {row["rewrite"]["rule"] for row in rows(tmp_path / "log") if "rewrite" in row} == {
        "lower"
    }
