"""All graphs of a dump as one HTML file that needs nothing else: `page.html` around the data below.

    {"graphs": [{"name", "lines": [text], "nodes": {name: details}, "moments": [
        {"title", "heading", "changed", "seconds", "figures", "lines": [index into lines], "changes": [block],
         "chart"}
    ]}]}

A line is stored once, however many passes leave it as it is. A pass that changes nothing has no chart.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxpasses.distributed.group import resolve
from fxpasses.dump.chart import chart_of
from fxpasses.dump.code import origin_of, program_origin, short_line, value_text
from fxpasses.dump.diff import blocks
from fxpasses.dump.dot import kind_of
from fxpasses.dump.errors import Difference
from fxpasses.dump.figures import figures_of
from fxpasses.dump.text import Lines, heading
from fxpasses.graph import TrainingGraph
from fxpasses.observers import GraphName
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Done, Observer
from fxpasses.rewrite import model_line
from fxpasses.schedule.machine import Machine

_PLACE = "/*DATA*/"


class Page:
    """Watches graphs and makes the page of them.

    Args:
        machine: what the schedules are predicted with.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._graphs: list[_Graph] = []

    def watch(self, name: GraphName) -> Observer:
        """The observer of one graph."""
        self._graphs.append(_Graph(name, self._machine))
        return self._graphs[-1]

    def add_errors(self, found: Mapping[tuple[str, int], Difference]) -> None:
        """Say of passes, by graph and number, how much results differ behind them."""
        for graph in self._graphs:
            for moment in graph.data["moments"]:
                number = int(moment["title"].split()[0])
                if (key := (graph.data["name"], number)) in found and number:
                    moment.update(found[key].data())

    def html(self) -> str:
        """The file."""
        data = json.dumps({"graphs": [graph.data for graph in self._graphs]}, separators=(",", ":"))
        page = importlib.resources.files("fxpasses.dump").joinpath("page.html").read_text()
        before, after = page.split(_PLACE)
        return before + data.replace("</", "<\\/") + after


class _Graph:
    """The data of one graph."""

    def __init__(self, name: GraphName, machine: Machine) -> None:
        self._name, self._machine = name, machine
        self._lines = Lines()
        self._indices: dict[str, int] = {}
        self._before: list[str] = []
        self._nodes: dict[str, dict[str, Any]] = {}
        self._moments: list[dict[str, Any]] = []
        self.data: dict[str, Any] = {
            "name": str(name),
            "lines": [],
            "nodes": self._nodes,
            "moments": self._moments,
        }

    def __call__(self, previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        lines = self._lines.of(graph)
        if previous is None and self._moments and lines == self._before:
            return  # the passes go on where they stopped
        changes = blocks(self._before, lines) if self._moments else ()
        self._moments.append(
            {
                "title": f"{previous.number:02d} {previous.made_by.name}"
                if previous
                else "00 input",
                "heading": heading(previous).removeprefix("# "),
                "changed": previous.report.changed if previous else True,
                "seconds": previous.seconds if previous else None,
                "figures": dataclasses.asdict(figures_of(graph)),
                "lines": [self._index(line) for line in lines],
                "changes": [b for b in changes if self._before[b[0] : b[1]] != lines[b[2] : b[3]]],
            }
        )
        if previous is None or previous.report.changed:
            chart = chart_of(graph, self._name, self._machine, resolve(None).size)
            self._moments[-1]["chart"] = chart
        for node in graph.graph.nodes:
            if node.name not in self._nodes:
                self._nodes[node.name] = _details(node)
        self._before = lines

    def _index(self, line: str) -> int:
        if line not in self._indices:
            self._indices[line] = len(self._indices)
            self.data["lines"].append(line)
        return self._indices[line]


def _details(node: fx.Node) -> dict[str, Any]:
    """What the page shows of a node that is clicked at."""
    origin = node.meta.get("provenance")
    found: dict[str, Any] = {
        "kind": kind_of(node),
        "value": value_text(node.meta.get("val")),
        "reads": [n.name for n in node.all_input_nodes],
        "origin": origin_of(origin) if origin else program_origin(node),
    }
    if origin is not None:
        found["pass"], found["rule"], found["source"] = origin.pass_name, origin.rule, origin.source
        found["parameters"] = origin.parameters
    line = short_line(origin.model_line if origin else model_line(node))
    return {**found, "line": line} if line else found
