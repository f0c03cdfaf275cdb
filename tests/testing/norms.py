"""What `measure_norms` promises, on every graph."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from torch import Tensor

from fxpasses.effects import is_launch
from fxpasses.passes.measure_norms import DECAY, FIELDS, STATISTICS, MeasureNorms
from fxpasses.testing.check import check_run, settings
from fxpasses.testing.oracles import ORACLES, Run
from fxpasses.testing.oracles.kept import no_dead_code
from fxpasses.testing.strategies import SEEDS, environments
from fxpasses.testing.synthetic import GradientGraph
from tests.testing.compression import real_graphs

SCHEME = "*=adaptive:levels=int8/topk;*0*=none"


def norms_of_what_adapts(examples: int) -> None:
    """Of each reduced gradient whose compression adapts: its norm, the average of that, and their number."""

    @settings(examples)
    @given(real_graphs(), environments(4), SEEDS)
    def search(source: GradientGraph, environment: dict[str, Any], seed: int) -> None:
        environment = {**environment, "compression": SCHEME, "levels": None}
        check_run(MeasureNorms(), source, environment, seed, (*ORACLES, _measured, no_dead_code))

    search()


def _measured(run: Run) -> None:
    assert [n.name for n in run.before.walk() if is_launch(n)] == [
        n.name for n in run.after.walk() if is_launch(n)
    ]
    gradients = {g.parameter: g for g in run.after.gradients() if g.node.meta["val"].numel()}
    adapting = {name for name in gradients if "0" not in name}
    given = {
        role.name: value
        for (_, role), value in zip(run.after.inputs(), run.traced_after.given, strict=True)
    }
    results = run.traced_after.results[0]
    found: list[str] = []
    for at, _, role in run.after.outputs("state"):
        if not role.name.startswith(f"{STATISTICS}/"):
            continue
        (node,) = (n for n, r in run.after.inputs("state") if r == role)
        names = [name for name, _ in node.meta["state"].parts]
        found += names
        norms = torch.stack([_norm(results[gradients[name].index]) for name in names])
        old = given[role.name].view(len(names), FIELDS)
        new = results[at].view(len(names), FIELDS)
        if not norms.isfinite().all():
            assert torch.equal(new.nan_to_num(), old.nan_to_num()), "what is not finite is left out"
            continue
        expected = torch.stack([norms, DECAY * old[:, 1] + (1 - DECAY) * norms, old[:, 2] + 1], 1)
        torch.testing.assert_close(new, expected, rtol=1e-5, atol=1e-6)
    assert sorted(found) == sorted(adapting)
    assert run.reports[0].counts == {"measured": len(adapting)}
    assert run.reports[0].changed == bool(adapting)


def _norm(value: Tensor) -> Tensor:
    return value.double().norm().float()
