"""`clip_norm` on graphs that nobody wrote by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from fxpasses.effects import is_launch
from fxpasses.graph import LIMIT_STATE, NORM_STATE, StateSpec
from fxpasses.passes.clip_norm import ClipNorm
from fxpasses.testing.check import run_over
from fxpasses.testing.oracles import Run
from fxpasses.testing.synthetic import GradientGraph, Leaf
from fxpasses.testing.values import random_inputs
from fxpasses.testing.world import run_world

CPU = torch.device("cpu")
WIDE = {True: torch.complex128, False: torch.float64}


@dataclasses.dataclass(frozen=True)
class Behind(ClipNorm):
    """It may stand alone where there is one rank; here it stands behind a reduction."""

    requires: ClassVar[frozenset[str]] = frozenset({"reduced"})


def clipped_as_promised(run: Run) -> None:
    """Each gradient is multiplied by min(1, limit / (norm + 1e-6)) of the norm of all; the norm is written, and
    nothing is sent.
    """
    graph, before = run.after, run.before
    gradients = [g for g in before.gradients() if g.node.meta["val"].numel()]
    if not gradients:
        assert not run.reports[0].changed
        return
    assert [n.name for n in graph.walk() if is_launch(n)] == [
        n.name for n in before.walk() if is_launch(n)
    ]
    specs = {node.meta["state"] for node, _ in graph.inputs("state")}
    limit_spec = StateSpec(LIMIT_STATE, "", (), torch.float32, CPU, 1.0)
    assert {limit_spec, StateSpec(NORM_STATE, "", (), torch.float32, CPU)} <= specs
    (at,) = [i for i, _, role in graph.outputs("state") if role.name == f"{NORM_STATE}/"]
    for rank in range(run.world):
        old, new = run.traced_before.results[rank], run.traced_after.results[rank]
        values = zip(graph.inputs(), random_inputs(graph, run.seed * 97 + rank), strict=True)
        (limit,) = [v.item() for (_, role), v in values if role.name == f"{LIMIT_STATE}/"]
        wide = {g.index: old[g.index].to(WIDE[old[g.index].is_complex()]) for g in gradients}
        norm = sum(value.abs().square().sum() for value in wide.values()).sqrt()
        if not norm.float().isfinite():
            assert all(not new[index].isfinite().any() for index in wide)
            continue
        torch.testing.assert_close(new[at].double(), norm, rtol=1e-4, atol=1e-30)
        factor = min(max(limit / (norm.item() + 1e-6), 0.0), 1.0)
        for index, value in wide.items():
            eps = torch.finfo(new[index].dtype).eps
            found = new[index].to(value.dtype)
            torch.testing.assert_close(found, value * factor, rtol=max(1e-4, 2 * eps), atol=1e-7)


def what_is_not_finite() -> None:
    """An infinite norm, of finite gradients or not, makes all gradients NaN: nobody steps on zeros."""
    graph = GradientGraph((Leaf((2,)), Leaf((1,))), gradients=(0, 1)).build()
    options = {"world": 1, "reduce": "mean", "bucket_mb": 1.0, "group": "world", "layout": None}
    run = run_over(Behind(max_norm=1.0), graph, options)
    for large in (math.inf, math.nan, 3e38):
        states = [torch.zeros(n.meta["val"].shape) for n, _ in run.after.inputs("state")]
        limit = [r.name for _, r in run.after.inputs("state")].index(f"{LIMIT_STATE}/")
        states[limit].fill_(1.0)
        inputs = [torch.tensor([large, 1.0]), torch.ones(1), *states]
        ((first, second, *_),) = run_world(run.after, [inputs])
        assert bool(first.isnan().all()) and bool(second.isnan().all())
