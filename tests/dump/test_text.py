"""Graphs as Python files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import custom_ops.wire16  # noqa: F401  (registers operators)
from fxpasses.dump.code import origin_of, short_line
from fxpasses.dump.text import Lines, text
from fxpasses.passes.bucketing import Bucketing
from fxpasses.rewrite import Provenance, splice
from fxpasses.trace import trace
from tests.graphs import doubled, execute, random_inputs


class Branches(nn.Module):
    """A condition, a constant, dropout, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.max_pool2d(self.layer(x)[None, None], 1)[0, 0]
        y = nn.functional.dropout(y, 0.5)
        y = torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y + 1, (y,))
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_each_node_says_what_it_is_and_where_it_comes_from():
    (joint, _) = trace(Branches(), (torch.ones(2, 4),))
    line = next(x for x in Lines().of(joint.after) if x.startswith("    addmm = "))
    code, comment = line.split("  # ")
    assert code.startswith("    addmm = torch.ops.aten.addmm.default(primals_2, ")
    number = Branches.forward.__code__.co_firstlineno + 1
    assert comment == f"float32[2, 4]  in layer (tests/dump/test_text.py:{number})"


def test_a_new_node_says_pass_rule_source_and_parameters():
    graph = doubled((3,), (2, 2))
    Bucketing(mb=1).run(graph)
    line = next(x for x in Lines().of(graph) if "aten.cat" in x)
    assert line.endswith("  # float32[7]  bucketing/flatten of mul_1 for p0, p1")


@pytest.mark.parametrize("character", ["\n", "\r", "\f", "\0", "\x85", "\u2028"])
def test_names_of_modules_end_no_line(character):
    model = nn.Sequential()
    model.add_module(f"a{character}raise", nn.Linear(2, 2))
    for traced in trace(model, (torch.ones(1, 2),), world=2):
        lines = text(None, traced.after).splitlines()
        compile("\n".join(lines), "dump", "exec")
        assert all("raise" not in line.partition("#")[0] for line in lines)
        assert any(f"a{ascii(character)[1:-1]}raise.weight" in line for line in lines)


def test_many_parameters_are_counted():
    origin = Provenance("sync", "launch", "flat", "/x/model.py:3", tuple("abcde"))
    assert origin_of(origin) == "sync/launch of flat for a, b, c and 2 more (/x/model.py:3)"


def test_a_file_says_what_runs_behind_operators(monkeypatch):
    monkeypatch.delenv("FXPASSES_KERNELS", raising=False)
    graph = doubled((8,))
    assert "operators on" not in text(None, graph)
    (gradient,) = (gradient.node for gradient in graph.gradients())
    origin = Provenance("test", "encode")
    splice(graph, graph.output_node, _encoded, gradient, name="encoded", provenance=origin)
    assert "\n# operators on cpu: cpp\n" in text(None, graph)
    monkeypatch.setenv("FXPASSES_KERNELS", "cuda")
    assert "\n# operators on cpu: none: FXPASSES_KERNELS=cuda: these kernels" in text(None, graph)


def _encoded(flat: torch.Tensor) -> torch.Tensor:
    return torch.ops.fxpasses.encode16(flat, flat.numel(), 1, "bf16")


@pytest.mark.parametrize(
    ("path", "short"),
    [
        (f"{Path.cwd()}/models/net.py:7", "models/net.py:7"),
        (f"{torch.__file__}:7", "torch/__init__.py:7"),
        ("/elsewhere/net.py:7", "/elsewhere/net.py:7"),
        ("", ""),
    ],
)
def test_paths_are_the_same_on_each_machine(path, short):
    assert short_line(path) == short


def test_files_run_alone(tmp_path):
    for graph in trace(Branches(), (torch.ones(2, 4),), {"precision": "bf16"}):
        path = tmp_path / f"{graph.name.graph}.py"
        path.write_text(text(None, graph.after))
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("tensor(") + done.stdout.count("None") == len(
            graph.after.outputs()
        )


def test_the_function_computes_what_the_graph_does():
    graph = doubled((3,), (2, 2))
    Bucketing(mb=1).run(graph)
    namespace: dict = {"__name__": "dumped"}
    exec(text(None, graph), namespace)
    inputs = random_inputs(graph)
    for found, expected in zip(
        namespace["forward"](None, *inputs), execute(graph, inputs), strict=True
    ):
        assert torch.equal(found, expected)


def test_lines_follow_edits():
    graph = doubled((3,))
    lines = Lines()
    lines.of(graph)
    (call,) = graph.walk()
    call.args = (call.args[0], 3)
    assert lines.of(graph) == Lines().of(graph)
    call._rename("other")
    assert lines.of(graph) == Lines().of(graph)
    with graph.graph.inserting_before(graph.output_node):
        graph.set_output(0, graph.graph.call_function(torch.ops.aten.neg.default, (call,)))
    call._rename("again")
    assert lines.of(graph) == Lines().of(graph)
    graph.inputs()[0][0]._rename("input_of_mine")
    assert lines.of(graph) == Lines().of(graph)


def test_a_function_of_python_is_written_by_its_module():
    graph = doubled((3,))
    with graph.graph.inserting_before(graph.output_node):
        size = graph.graph.call_function(torch.sym_max, (2, 3))
    assert "    sym_max = torch.sym_max(2, 3)" in Lines().of(graph)
    assert size.target is torch.sym_max
