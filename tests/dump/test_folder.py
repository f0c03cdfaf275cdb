"""The files that a dump leaves."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from fxpasses.dump.folder import Dump
from fxpasses.dump.serial import graph_of
from fxpasses.observers import CheckRules
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.pipeline import Pipeline
from fxpasses.spec import SpecError
from tests.graphs import WORLD, Does, add_call, backward_of, doubled


def dumped(graph, folder, *passes) -> dict[str, str]:
    Pipeline(passes).run("backward", graph, [Dump(folder)])
    return {path.name: path.read_text() for path in sorted(folder.glob("*.py"))}


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
    assert "    tangents_1,  # float32[4, 2]  input tangents_1: tangent tangents_1\n" in text
    outputs = [line.split(": ", 1)[1] for line in text.splitlines() if "  # output " in line]
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


def test_each_moment_has_its_formats(tmp_path):
    dumped(doubled((3,)), tmp_path, Bucketing(mb=1), Does(action=idle))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        *(f"00-input.{suffix}" for suffix in ("dot", "json", "py")),
        *(f"01-bucketing.{suffix}" for suffix in ("diff", "dot", "json", "py")),
        *(f"02-does.{suffix}" for suffix in ("diff", "dot", "json", "py")),
    ]
    assert (tmp_path / "02-does.diff").read_text() == ""
    diff = (tmp_path / "01-bucketing.diff").read_text()
    assert diff.startswith("--- 00-input.py\n+++ 01-bucketing.py\n@@ ")


def test_the_diff_leads_from_file_to_file(tmp_path):
    files = dumped(doubled((3,), (2, 2)), tmp_path, Bucketing(mb=1))
    old, new = (text.split("if __name__")[0].splitlines() for text in files.values())
    diff = (tmp_path / "01-bucketing.diff").read_text().splitlines()
    assert patched(old, diff)[1:] == new[1:]  # all but the heading


def patched(lines: list[str], diff: list[str]) -> list[str]:
    """What `patch` makes of a file."""
    result: list[str] = []
    at = 0
    for line in diff[2:]:
        if line.startswith("@@"):
            start = int(line.split()[1].split(",")[0][1:]) - 1
            result += lines[at:start]
            at = start
        elif line[0] == "+":
            result.append(line[1:])
        else:
            assert lines[at] == line[1:]
            at += 1
            result += [line[1:]] if line[0] == " " else []
    return result + lines[at:]


def test_the_json_reads_back(tmp_path):
    graph = doubled((3,), (2, 2))
    dumped(graph, tmp_path, Bucketing(mb=1))
    data = json.loads((tmp_path / "01-bucketing.json").read_text())
    assert data["after"] == "bucketing{mb=1}" and data["changed"]
    assert data["counts"] == {"buckets": 1, "gradients": 2}
    assert graph_of(data).fingerprint() == graph.fingerprint()


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path):
    """A backward runs its local passes, is prepared, and runs the others."""
    first, second = Does(action=idle), Bucketing(mb=1)
    pipeline, dump, graph = Pipeline((first, second)), Dump(tmp_path), doubled((3,))
    for current in pipeline.passes:
        Pipeline((current,)).run("backward", graph, [dump])
    names = sorted(path.name for path in tmp_path.glob("*.py"))
    assert names == ["00-input.py", "01-bucketing.py", "01-does.py"]


def test_what_happens_between_two_runs_has_a_file(tmp_path):
    dump, graph = Dump(tmp_path), doubled((3,))
    Pipeline((Does(action=idle),)).run("backward", graph, [dump])
    graph.set_output(0, add_call(graph, torch.ops.aten.neg.default, graph.inputs()[0][0]))
    Pipeline(()).run("backward", graph, [dump])
    assert "neg" in (tmp_path / "01-prepared.diff").read_text()
