"""Graphs as DOT."""

from __future__ import annotations

import re

import torch

from fxpasses.dump.dot import DotLines, kind_of
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.compress import Compress
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.trace import trace
from tests.graphs import WORLD, doubled, mlp, nodes_with


def test_a_box_for_each_node_and_an_arrow_for_each_use():
    graph = doubled((3,), (2, 2))
    Bucketing(mb=1).run(graph)
    lines = DotLines().of(graph)
    assert lines[0] == "digraph {" and lines[-1] == "}"
    boxes = [re.match(r'  "(\w+)" \[', line)[1] for line in lines if " [label=" in line]
    assert boxes == [node.name for node in graph.graph.nodes]
    arrows = {tuple(re.findall(r'"(\w+)"', line)) for line in lines if " -> " in line}
    assert arrows == {(u.name, n.name) for n in graph.graph.nodes for u in n.all_input_nodes}


def test_new_nodes_have_a_bold_border():
    graph = doubled((3,))
    lines = DotLines()
    lines.of(graph)
    Bucketing(mb=1).run(graph)
    bold = [line for line in lines.of(graph, {"bucket0_cat"}) if "penwidth" in line]
    assert len(bold) == 1 and '"bucket0_cat"' in bold[0]


def test_kinds_of_nodes(fake_world):
    graph = doubled((300,))
    Bucketing(mb=1).run(graph)
    Compress(scheme="int8", reduce="mean", group=fake_world, world=WORLD, rank=0).run(graph)
    kinds = {node.name: kind_of(node) for node in graph.graph.nodes}
    assert kinds["bucket0_quantise"] == kinds["bucket0_dequantise"] == "codec"
    assert kinds["bucket0_wait_tensor"] == "collective" and kinds["mul"] == "program"
    assert (
        kinds["output"] == "output"
        and kinds["arg0_1" if "arg0_1" in kinds else graph.inputs()[0][0].name] == "input"
    )
    assert "pass" in kinds.values()


def test_casts_have_a_colour():
    joint, _ = trace(mlp(4, 4), (torch.ones(2, 4),), {"precision": "bf16"})
    casts = nodes_with(joint.after, torch.ops.prims.convert_element_type.default)
    assert casts and {kind_of(node) for node in casts} == {"cast"}
    assert any("#ffe699" in line for line in DotLines().of(joint.after))


def test_quotes_in_labels_are_escaped(fake_world):
    graph = doubled((3,))
    Bucketing(mb=1).run(graph)
    GradientSync(group=fake_world, world=WORLD, reduce="mean").run(graph)
    for line in DotLines().of(graph):
        assert len(re.findall(r'(?<!\\)"', line)) % 2 == 0
