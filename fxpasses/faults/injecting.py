"""What passes that inject faults share: each puts faults at sites of its own."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fxpasses.faults import models
from fxpasses.faults.sites import Site, select
from fxpasses.faults.spec import Fault, parse_faults
from fxpasses.graph import FAULT_NEWS, FAULT_TABLE, StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class Shot:
    """One fault at one site.

    Attributes:
        number: of the fault in the option, its row in the table.
        rows: the table.
    """

    site: Site
    number: int
    fault: Fault
    rows: fx.Node


@dataclasses.dataclass(frozen=True)
class Injecting(Pass):
    """Environment: `faults`, the option in pipeline form."""

    faults: str | None = from_environment("faults")

    def __post_init__(self) -> None:
        parse_faults(self.faults or "")

    @property
    def parsed(self) -> tuple[Fault, ...]:
        return parse_faults(self.faults or "")

    def sites(self, graph: TrainingGraph) -> list[tuple[fx.Node, Site]]:
        raise NotImplementedError

    def has_work(self, graph: TrainingGraph) -> bool:
        return bool(select(graph, self.sites(graph), self.parsed))

    def run(self, graph: TrainingGraph) -> Report:
        faults = self.parsed
        sites = select(graph, self.sites(graph), faults) if faults else []
        if not sites:
            return Report(changed=False)
        table, news = tables(len(faults), sites[0][0].meta["val"].device)
        rows = graph.add_state(table)
        found: list[list[fx.Node]] = [[] for _ in faults]
        for node, site in sites:
            for number in site.faults:
                node, heard = self.strike(graph, node, Shot(site, number, faults[number], rows))
                found[number].append(heard)
        told = splice(
            graph,
            graph.output_node,
            models.together,
            found,
            graph.state_so_far(news),
            name="fault_news",
            provenance=Provenance(self.name, "news"),
        )
        graph.write_state(news.name, told)
        return Report(True, {"sites": len(sites)})

    def strike(self, graph: TrainingGraph, node: fx.Node, shot: Shot) -> tuple[fx.Node, fx.Node]:
        """Put one fault at one site; returns what holds the tensor now, and the news."""
        readers = list(node.users)
        struck, heard = self.write(graph, graph.behind(node), node, shot)
        for reader in readers:
            reader.replace_input_with(node, struck)
        return struck, heard

    def write(
        self, graph: TrainingGraph, before: fx.Node, node: fx.Node, shot: Shot
    ) -> tuple[fx.Node, fx.Node]:
        site, fault = shot.site, shot.fault
        struck, heard = splice(
            graph,
            before,
            lambda x, rows: models.strike(x, rows[shot.number], fault, site.number),
            node,
            shot.rows,
            name=f"fault_{site.name}",
            provenance=Provenance(
                self.name, fault.model, site.name, site.model_line, site.parameters
            ),
        )
        struck.meta["fault"] = site
        struck.meta["effect"] = f"fault at {site}"
        heard.meta[FAULT_NEWS] = site
        return struck, heard


def tables(count: int, device: torch.device) -> tuple[StateSpec, StateSpec]:
    """What a graph with so many faults reads and writes."""
    return (
        StateSpec(FAULT_TABLE, "", (count, models.ROW), torch.int64, device),
        StateSpec(FAULT_NEWS, "", (count, models.NEWS), torch.int64, device),
    )
