"""Over the zoo, the pass `cast` puts no more casts into a graph than autocast does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from fxpasses import inductor
from fxpasses.graph import TrainingGraph
from fxpasses.observers import CheckRules
from fxpasses.passes.cast import Cast
from fxpasses.pipeline import Pipeline
from fxpasses.precision import operator_name
from fxpasses.testing import capture
from tests.zoo import ZOO, Entry


def casts(graph: TrainingGraph) -> int:
    """Casts between fp32 and bf16."""
    found = [n for n in graph.walk() if operator_name(n) in ("convert_element_type", "_to_copy")]
    dtypes = [{n.args[0].meta["val"].dtype, n.meta["val"].dtype} for n in found]
    return dtypes.count({torch.float32, torch.bfloat16})


def joint_of(entry: Entry, autocast: bool) -> TrainingGraph:
    model, batch = entry.seeded(), entry.batch(0)

    def program(*inputs: torch.Tensor) -> torch.Tensor:
        context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:  # `enabled=False` would say something: keep fp32 here
            outputs = model(*inputs)
        return entry.loss(pytree.tree_map(_as_fp32, outputs), *batch.targets)

    return capture(program, *batch.inputs, decompositions=inductor.decompositions()).joint


def _as_fp32(value: Any) -> Any:
    is_low = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_low else value


@pytest.mark.parametrize("name", list(ZOO))
def test_no_more_casts_than_autocast_leaves(name):
    theirs, ours = joint_of(ZOO[name], autocast=True), joint_of(ZOO[name], autocast=False)
    assert casts(ours) == 0
    (done,) = Pipeline((Cast("bf16", ""),)).run("joint", ours, [CheckRules()])
    assert 0 < done.report.counts["casts"] == casts(ours) <= casts(theirs)
    assert not Cast("bf16", "").run(ours).changed
