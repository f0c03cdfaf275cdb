"""Faults of phase `update` in a whole step that updates parameters itself: what it writes to them.

    before   sub ─▶ copy_(weight)          after   sub ─▶ (bits & keep) ^ flip where armed ─▶ copy_(weight)

Not in pipelines: parameters are written in the tail of a whole step (`fxpasses.tail`), which no pipeline sees.
It runs over the graph that head and tail have been joined to.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from fxpasses.config import nearest
from fxpasses.faults.injecting import Injecting, Shot
from fxpasses.faults.sites import Site, select, written_parameters
from fxpasses.faults.spec import UPDATE
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Report


@dataclasses.dataclass(frozen=True)
class InjectUpdate(Injecting):
    """Environment: `faults`, the option in pipeline form."""

    name: ClassVar[str] = "inject_update"
    stage: ClassVar[str] = "backward"

    def sites(self, graph: TrainingGraph) -> list[tuple[fx.Node, Site]]:
        return written_parameters(graph)

    def run(self, graph: TrainingGraph) -> Report:
        """
        Raises:
            ValueError: for a fault that selects none of the parameters that the graph writes.
        """
        sites, faults = self.sites(graph), self.parsed
        hit = {n for _, site in select(graph, sites, faults) for n in site.faults}
        for number, fault in enumerate(faults):
            if sites and fault.phase == UPDATE and number not in hit:
                names = [site.name for _, site in sites]
                raise ValueError(
                    f"option 'faults': {fault.text!r} selects no parameter that the compiled function "
                    f"updates{nearest(fault.pattern, names)}"
                )
        return super().run(graph)

    def strike(self, graph: TrainingGraph, node: fx.Node, shot: Shot) -> tuple[fx.Node, fx.Node]:
        """Here the node is the write."""
        value = node.args[1]
        assert isinstance(value, fx.Node)
        struck, heard = self.write(graph, node, value, shot)
        node.args = (node.args[0], struck, *node.args[2:])
        return node, heard
