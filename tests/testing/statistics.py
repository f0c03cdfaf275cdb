"""`running_stats` on graphs that nobody wrote by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import TrainingGraph
from fxpasses.passes.running_stats import RunningStats
from fxpasses.spec import check as check_rules
from fxpasses.testing.check import run_over, settings
from fxpasses.testing.oracles import Run
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.oracles.rules import report_honest, same_on_all_ranks, signature_kept
from fxpasses.testing.strategies import SEEDS, environments, whole_steps
from fxpasses.testing.synthetic import GradientGraph, Leaf
from fxpasses.testing.values import random_inputs


def statistics_as_promised(run: Run) -> None:
    """After the backward each rank holds rank 0's floats; one broadcast a dtype, waits last."""
    current, graph = run.current, run.after
    assert isinstance(current, RunningStats)
    specs = [s for s in run.before.written_buffers if s.dtype.is_floating_point]
    launches = [n for n in graph.walk() if is_launch(n)]
    waits = [n for n in graph.walk() if is_wait(n)]
    assert len(launches) == len(waits) == len({s.dtype for s in specs})
    assert run.reports[0].counts == {"broadcasts": len(launches), "buffers": len(specs)}
    assert all(n.target is torch.ops._c10d_functional.broadcast.default for n in launches)
    assert all(n.args[1:] == (0, current.group) and not n.meta.get("reduces") for n in launches)
    assert [w.args[0] for w in waits] == launches
    own = [n.name for n in run.before.walk()]
    order = [n.name for n in graph.walk()]
    at = [order.index(name) for name in own]
    assert not at or not waits or order.index(waits[0].name) > max(at)
    if run.before.inputs("tangent"):
        assert not at or not launches or order.index(launches[-1].name) < min(at)
        assert sorted(s.name for s in specs) == sorted(r.name for _, r in graph.inputs("state"))
    else:
        assert not graph.inputs("state")
        _launched_behind_gradients(run, launches)
    values = _of_rank_0(run)
    written = [(i, r) for i, _, r in graph.outputs() if r.kind in ("state", "mutation")]
    assert {role.name.removeprefix("buffer/") for _, role in written} >= {
        s.parameter for s in specs
    }
    for rank, row in enumerate(run.traced_after.results):
        for index, role in written:
            if role.name.removeprefix("buffer/") in {s.parameter for s in specs}:
                assert bitwise(row[index], values[role.name]), f"{role.name} is not rank 0's"
            else:  # integers stay each rank's
                assert bitwise(row[index], run.traced_before.results[rank][index])


def _launched_behind_gradients(run: Run, launches: list[fx.Node]) -> None:
    """In a whole step they stand behind what they send and the last gradient, so in no gradient's way; right
    behind, so that as much as possible hides them; where ranks' graphs differ, behind all.
    """
    if not launches:
        return
    order = [n.name for n in run.after.graph.nodes]
    floats = {s.parameter for s in run.before.written_buffers if s.dtype.is_floating_point}
    latest = [
        order.index(node.name)
        for _, node, role in run.before.outputs()
        if node is not None
        and (role.kind == "gradient" or (role.kind == "mutation" and role.name in floats))
    ]
    own = [order.index(n.name) for n in run.before.walk()]
    first = order.index(launches[0].name)
    assert first > max(latest)
    if run.current.layout is not None:  # type: ignore[attr-defined]
        assert first > max(own)
    else:
        assert not [at for at in own if max(latest) < at < order.index(launches[-1].name)]


def _of_rank_0(run: Run) -> dict[str, Any]:
    """What rank 0's forward left in each buffer."""
    graph = run.after
    found = {r.name: run.traced_before.results[0][i] for i, _, r in run.before.outputs("mutation")}
    inputs = zip(graph.inputs("state"), _states(graph, run.seed * 97), strict=True)
    return found | {role.name: value for (_, role), value in inputs}


def _states(graph: TrainingGraph, seed: int) -> list[Any]:
    given = zip(graph.inputs(), random_inputs(graph, seed), strict=True)
    return [value for (_, role), value in given if role.kind == "state"]


def statistics_of_whole_steps(examples: int) -> None:
    """Where the graph holds the forward too, with and without an agreed order."""

    @settings(examples)
    @given(whole_steps(), environments(3), SEEDS, st.booleans())
    def search(source: GradientGraph, environment: dict[str, Any], seed: int, agreed: bool) -> None:
        layout = ("elsewhere.weight",) if agreed else None
        _holds(source, {**environment, "layout": layout}, seed)

    search()


def statistics_of_many_buffers(examples: int) -> None:
    """Buffers of several dtypes in any order: as many broadcasts as there are dtypes."""
    leaves = st.builds(
        Leaf, st.sampled_from(((2,), (), (0,))), st.sampled_from(("float32", "float64", "int64"))
    )

    @settings(examples)
    @given(st.lists(leaves, min_size=3, max_size=6), environments(2), SEEDS, st.booleans())
    def search(
        buffers: list[Leaf], environment: dict[str, Any], seed: int, whole_step: bool
    ) -> None:
        source = GradientGraph((Leaf((2,)),), (), (0,), buffers=tuple(buffers))
        _holds(dataclasses.replace(source, whole_step=whole_step), environment, seed)

    search()


def _holds(source: GradientGraph, environment: dict[str, Any], seed: int) -> None:
    run = run_over(RunningStats(), source.build(), environment, seed)
    check_rules(run.after, "running_stats")
    for oracle in (signature_kept, report_honest, same_on_all_ranks, statistics_as_promised):
        oracle(run)
