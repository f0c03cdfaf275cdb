"""Graphs drawn small."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from click.testing import CliRunner

from fxpasses.cli import main
from fxpasses.dump.modules import collapsed, svg
from fxpasses.trace import trace
from tests.golden.model import TwoHeads

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")


@pytest.fixture(scope="module")
def graphs():
    joint, backward = trace(TwoHeads(), (torch.ones(3, 4),), world=2)
    return joint.after, backward.after


def boxes(lines: list[str]) -> dict[str, str]:
    found = (re.match(r'  (g\d+) \[label="(.*)", fillcolor', line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def test_a_small_graph_is_drawn_node_by_node(graphs):
    for graph in graphs:
        found = boxes(collapsed(graph, 10_000)).values()
        assert list(found) == [node.name for node in graph.graph.nodes]


def test_nodes_of_a_module_become_one_box(graphs):
    joint, _ = graphs
    found = list(boxes(collapsed(joint, 20)).values())
    assert len(found) <= 20
    assert any(label.startswith("layer\\n") and label.endswith(" nodes") for label in found)
    assert any(label.startswith("norm\\nbackward\\n") for label in found)
    assert "inputs\\nparameter\\n8 nodes" in found


def test_all_nodes_are_counted_once(graphs):
    for graph in graphs:
        for limit in (1, 20, 60):
            labels = boxes(collapsed(graph, limit)).values()
            counts = [int(m[1]) if (m := re.search(r"(\d+) nodes$", x)) else 1 for x in labels]
            assert sum(counts) == len(graph.graph.nodes)


def test_arrows_lead_between_boxes_and_are_counted(graphs):
    _, backward = graphs
    lines = collapsed(backward, 20)
    arrows = [re.match(r"  (g\d+) -> (g\d+)", line) for line in lines if " -> " in line]
    assert arrows and all(
        m and m[1] != m[2] and {m[1], m[2]} <= boxes(lines).keys() for m in arrows
    )
    assert any(line.endswith("]") and "label=" in line for line in lines if " -> " in line)


@needs_graphviz
def test_the_command_draws(tmp_path):
    target = "tests/dump/test_modules.py:make"
    result = CliRunner().invoke(main, ["dump", target, "--svg", str(tmp_path), "--svg-nodes", "20"])
    assert result.exit_code == 0, result.output
    for name in ("joint", "backward"):
        text = (tmp_path / "rank0" / f"g0.{name}.svg").read_text()
        assert "</svg>" in text and 3 < text.count('class="node"') <= 20


def test_without_graphviz_it_says_so(graphs, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="needs Graphviz"):
        svg(graphs[0], 20)
    target = "tests/dump/test_modules.py:make"
    result = CliRunner().invoke(main, ["dump", target, "--svg", "drawings"])
    assert result.exit_code == 2 and result.output.startswith(
        "Error: option '--svg': needs Graphviz"
    )


def make():
    return TwoHeads(), torch.ones(3, 4)
