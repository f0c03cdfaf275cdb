"""Buckets that somebody else reads as well, and of which compilers make something else than concatenations."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.graph import Role, TrainingGraph
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.rewrite import Provenance, splice
from fxpasses.spec import check as check_rules
from fxpasses.spec import reduced_once
from fxpasses.testing.check import settings
from fxpasses.testing.oracles import run_pass
from fxpasses.testing.oracles.numerics import bitwise, results_right
from fxpasses.testing.strategies import SEEDS, environments, gradient_graphs
from fxpasses.testing.synthetic import GradientGraph

aten = torch.ops.aten


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> Any:
    """As Inductor decomposes it."""
    return tensors[0].clone() if len(tensors) == 1 else NotImplemented


def readers_of_buckets(examples: int) -> None:
    """Who reads a bucket besides its gradients goes on reading this rank's; with one rank nothing is divided;
    what is divided for the mean is each part, in front of what puts them together.
    """

    @settings(examples)
    @given(
        gradient_graphs(),
        st.one_of(environments(1), environments(3)),
        SEEDS,
        st.sampled_from(("any", "fixed")),
        st.booleans(),
        st.booleans(),
    )
    def search(
        source: GradientGraph,
        environment: dict[str, Any],
        seed: int,
        order: str,
        read: bool,
        decomposed: bool,
    ) -> None:
        table = {aten.cat.default: _cat} if decomposed else {}
        graph = TrainingGraph(source.build().module, table)
        world = environment["world"]
        environment = {**environment, "rank": 0}
        Bucketing().bind(environment).run(graph)
        flats = [n for n in graph.walk() if "bucket" in n.meta]
        for index, flat in enumerate(flats if read else []):
            origin = Provenance("test", "sum")
            place = graph.output_node
            total = splice(graph, place, torch.sum, flat, name="sum", provenance=origin)
            graph.add_output(total, Role("output", f"sum{index}"))
        current = GradientSync(order=order).bind(environment)
        run = run_pass([current] * world, graph, frozenset({"buckets", "reduced"}), seed)
        check_rules(run.after, "gradient_sync", (reduced_once,))
        results_right(run)
        for at, _, role in run.before.outputs("output"):
            for old, new in zip(run.traced_before.results, run.traced_after.results, strict=True):
                assert bitwise(old[at], new[at]), f"{role.name} is not this rank's"
        assert ("bucket0" in {n.name.partition("_")[0] for n in run.after.walk()}) == bool(flats)
        _divides_parts(run.before, run.after, environment["reduce"] == "mean" and world > 1)

    search()


def _divides_parts(before: TrainingGraph, after: TrainingGraph, expected: bool) -> None:
    known = {n.name for n in before.graph.nodes}
    divisions = [n for n in after.walk() if n.name not in known and n.target is aten.div.Tensor]
    buckets = [n.meta["bucket"] for n in before.walk() if "bucket" in n.meta]
    parts = sum(len(bucket.parameters) for bucket in buckets)
    assert len(divisions) == (parts if expected else 0), (
        f"{len(divisions)} divisions, {parts} parts"
    )
