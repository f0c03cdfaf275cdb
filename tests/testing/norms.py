"""What `measure_norms` promises, on every graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.graph import Role
from fxpasses.passes.measure_norms import DECAY, FIELDS, STATISTICS, MeasureNorms
from fxpasses.testing.check import check_run, settings
from fxpasses.testing.oracles import ORACLES, Run
from fxpasses.testing.strategies import SEEDS, environments
from fxpasses.testing.synthetic import GradientGraph, Leaf, parameter_name
from tests.testing.again import again
from tests.testing.clipping import nothing_new_is_sent
from tests.testing.compression import real_graphs
from tests.testing.properties import no_leftovers

LEVELS = ("int8", "topk")


def norms_of_what_adapts(examples: int) -> None:
    """Of each reduced gradient whose compression adapts: its norm, the average of that, and their number."""
    chosen = st.dictionaries(st.integers(0, 4).map(parameter_name), st.sampled_from(LEVELS))

    @settings(examples)
    @given(real_graphs(), environments(4), st.one_of(st.none(), chosen), SEEDS)
    def search(
        source: GradientGraph,
        environment: dict[str, Any],
        chosen: dict[str, str] | None,
        seed: int,
    ) -> None:
        _held(source, environment, chosen, seed)

    search()


def norms_of_wide_gradients() -> None:
    """Of fp64; and behind one that has no level, in the same bucket."""
    tangents = tuple(Leaf((size,), "float64") for size in (2, 3, 4, 5))
    source = GradientGraph(tangents, gradients=(0, 1, 2, 3))
    environment = {"world": 2, "reduce": "mean", "bucket_mb": 1.0, "group": "world"}
    for chosen in (None, dict.fromkeys(map(parameter_name, (1, 3)), "int8")):
        _held(source, environment, chosen, 0)


SINGLE = (norms_of_wide_gradients,)


def _held(
    source: GradientGraph, environment: dict[str, Any], chosen: dict[str, str] | None, seed: int
) -> None:
    # The first parameter does not adapt, and shares buckets with those that do. Of the others those that have
    # a level, or all if nobody says which have.
    scheme = f"*=adaptive:levels={'/'.join(LEVELS)};*0*=int8"
    levels = None if chosen is None else tuple(sorted(chosen.items()))
    environment = {**environment, "compression": scheme, "levels": levels}
    check_run(MeasureNorms(), source, environment, seed, (*ORACLES, _measured, no_leftovers))


def _measured(run: Run) -> None:
    current = run.current
    assert isinstance(current, MeasureNorms)
    nothing_new_is_sent(run)
    sizes = {g.parameter: g.node.meta["val"].numel() for g in run.after.gradients()}
    known = sizes if current.levels is None else dict(current.levels)
    adapting = {name for name, size in sizes.items() if size and "0" not in name and name in known}
    states = [n.meta["state"] for n, r in run.after.inputs("state") if _is_statistic(r.name)]
    assert sorted(name for spec in states for name, _ in spec.parts) == sorted(adapting)
    assert run.reports[0].counts == {"measured": len(adapting)}
    _right(run, run.traced_after.given, run.traced_after.results[0])

    def infinite(rank: int, role: Role, value: Any) -> Any:
        return value * torch.inf if role.kind == "tangent" else value

    _right(run, run.traced_after.given, again(run, run.afters, infinite)[0])


def _right(run: Run, given: Sequence[Any], results: Sequence[Any]) -> None:
    """The statistics that rank 0 writes, by those that it read and by the gradients that it has."""
    gradients = {g.parameter: results[g.index] for g in run.after.gradients()}
    read = {r.name: value for (_, r), value in zip(run.after.inputs(), given, strict=True)}
    specs = {r.name: node.meta["state"] for node, r in run.after.inputs("state")}
    for at, _, role in run.after.outputs("state"):
        if not _is_statistic(role.name):
            continue
        names = [name for name, _ in specs[role.name].parts]
        norms = torch.stack([gradients[name].double().norm().float() for name in names])
        old, new = (x.view(len(names), FIELDS) for x in (read[role.name], results[at]))
        expected = torch.stack([norms, DECAY * old[:, 1] + (1 - DECAY) * norms, old[:, 2] + 1], 1)
        if not norms.isfinite().all():
            expected = old
        torch.testing.assert_close(new, expected, rtol=1e-5, atol=1e-6)


def _is_statistic(name: str) -> bool:
    return name.startswith(f"{STATISTICS}/")
