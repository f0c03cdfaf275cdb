"""Dump and clock. What `CheckRules` finds stands in test_spec."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from fxpasses.observers import CheckRules, Clock, Dump
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.pipeline import Pipeline
from fxpasses.spec import SpecError
from tests.graphs import WORLD, Does, add_call, backward_of, doubled


def dumped(graph, folder, *passes) -> dict[str, str]:
    Pipeline(passes).run("backward", graph, [Dump(folder)])
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def idle(graph) -> Report:
    return Report(changed=False)


def test_one_file_before_and_one_after_each_pass(fake_world, tmp_path):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    files = dumped(doubled((3,)), tmp_path / "a" / "b", Bucketing(mb=2), sync)
    assert list(files) == ["00-input.py", "01-bucketing.py", "02-gradient_sync.py"]


def test_files_begin_with_what_the_pass_did(tmp_path):
    files = dumped(doubled((3,)), tmp_path, Bucketing(mb=2), Does(action=idle))
    heads = [text.splitlines()[0] for text in files.values()]
    assert heads[:2] == [
        "# input of the pipeline",
        "# after bucketing{mb=2}: buckets=1, gradients=1",
    ]
    assert heads[2].startswith("# after does{") and heads[2].endswith(": unchanged")


def test_a_change_without_counts_is_told(tmp_path):
    def act(graph) -> None:
        add_call(graph, torch.ops.aten.neg.default, graph.inputs()[0][0])

    files = dumped(doubled((3,)), tmp_path, Does(action=act))
    assert files["01-does.py"].splitlines()[0].endswith(": changed")


def test_files_hold_roles_and_code(tmp_path):
    files = dumped(backward_of(nn.Linear(3, 2), torch.randn(4, 3)), tmp_path)
    (text,) = files.values()
    lines = text.splitlines()
    assert "# input tangents_1: tangent tangents_1" in lines
    outputs = [line.split(": ", 1)[1] for line in lines if line.startswith("# output ")]
    assert len(outputs) == 3 and {"gradient weight", "gradient bias"} <= {
        output.split(" = ")[0] for output in outputs
    }
    assert any(o.startswith("input_gradient") and o.endswith(" = None") for o in outputs)
    compile(text, "dump", "exec")
    assert "torch.ops.aten.mm.default" in text


def test_two_runs_write_the_same_bytes(tmp_path):
    first, second = (dumped(doubled((3,)), tmp_path / x, Bucketing(mb=1)) for x in "ab")
    assert first == second


def test_the_dump_holds_the_graph_at_its_time(tmp_path):
    files = dumped(doubled((3,)), tmp_path, Bucketing(mb=1))
    assert "cat" not in files["00-input.py"] and "cat" in files["01-bucketing.py"]


def test_a_broken_graph_is_dumped_if_the_dump_comes_first(tmp_path):
    def act(graph) -> None:
        node = add_call(graph, torch.ops.aten.neg.default, graph.inputs()[0][0])
        graph.set_output(0, node)
        del node.meta["val"]

    pipeline = Pipeline((Does(action=act),))
    with pytest.raises(SpecError):
        pipeline.run("backward", doubled((3,)), [Dump(tmp_path), CheckRules()])
    assert "neg" in (tmp_path / "01-does.py").read_text()


def test_the_clock_times_each_pass(monkeypatch):
    times = iter([10.0, 13.0, 13.0, 18.0, 18.0])
    fake = types.SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("fxpasses.observers.time", fake)
    clock = Clock()
    Pipeline((Bucketing(mb=1), Does(action=idle))).run("backward", doubled((3,)), [clock])
    assert clock.seconds == {"bucketing": 3.0, "does": 5.0}


def test_rules_of_one_run_say_nothing_of_another(fake_world):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    for shape in ((3,), (4, 2)):
        Pipeline((Bucketing(mb=1), sync)).run("backward", doubled(shape), [CheckRules()])
    with pytest.raises(SpecError, match="signature"):
        rules = CheckRules()
        for shape in ((3,), (4, 2)):
            Pipeline((Bucketing(mb=1),)).run("backward", doubled(shape), [rules])
