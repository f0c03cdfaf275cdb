"""What passes state of themselves beyond their contract, as functions that tests can call.

A pass may define these itself, as methods and class attributes of the same names:

    def tolerance(self, local, out):     the bound that `error_bound` states, as numbers
    def has_work(self, graph):           whether `run` will change the graph
    idempotent: ClassVar[bool]           whether a second run changes no result; True if not said

For passes that don't, `state` tells it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass

# (pass, what each rank's graph computes: (ranks, *shape), what the pass made of it: shape) → largest error
Tolerance = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Statement:
    """What is known of a pass.

    Attributes:
        tolerance: element by element the largest error of a gradient. What it is compared with is this
            rank's own gradient, or the mean or sum over the ranks for a pass that provides `reduced`.
        idempotent: whether a second run changes no result.
        has_work: whether a run changes a graph.
    """

    tolerance: Tolerance | None = None
    idempotent: bool = True
    has_work: Callable[[Any, TrainingGraph], bool] | None = None


_stated: dict[str, Statement] = {}


def state(name: str, statement: Statement) -> None:
    """Tell what holds of a pass that does not say so itself."""
    _stated[name] = statement


def statement_of(current: Pass) -> Statement:
    """What a pass says of itself, before what was told of it."""
    told = _stated.get(current.name, Statement())
    cls = type(current)
    own = {
        field.name: getattr(cls, field.name)
        for field in dataclasses.fields(Statement)
        if hasattr(cls, field.name)
    }
    return dataclasses.replace(told, **own)


def sync_tolerance(current: Any, local: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The bound of `gradient_sync`: no bound where a partial sum may leave the wire's normal range."""
    from fxpasses.passes.gradient_sync import TORCH_DTYPES

    ranks = local.shape[0]
    wire = torch.finfo(TORCH_DTYPES[current.dtype] if current.dtype else local.dtype)
    parts = local.abs().double() / (ranks if current.reduce == "mean" else 1)
    bound = (ranks + 1) * wire.eps * parts.sum(0)
    bound += torch.finfo(local.dtype).eps * out.abs().double()
    tiny = torch.maximum(torch.tensor(wire.tiny), torch.tensor(torch.finfo(local.dtype).tiny))
    normal = (parts.sum(0) <= wire.max) & ((parts == 0) | (parts >= tiny)).all(0)
    return torch.where(normal, bound, torch.inf)


def _has_buckets(current: Any, graph: TrainingGraph) -> bool:
    return any("bucket" in node.meta for node in graph.walk())


def _has_elements(current: Any, graph: TrainingGraph) -> bool:
    return any(g.node.meta["val"].numel() for g in graph.gradients())


def _has_choice(current: Any, graph: TrainingGraph) -> bool:
    if current.layout is not None:
        return True
    outputs = graph.outputs("gradient") + graph.outputs("input_gradient")
    needs = {_tangents_of(node) for _, node, _ in outputs if node is not None}
    return len(needs - {frozenset()}) > 1


def _tangents_of(node: Any) -> frozenset[str]:
    seen, pending = set(), [node]
    while pending:
        at = pending.pop()
        if at not in seen:
            seen.add(at)
            pending += at.all_input_nodes
    return frozenset(
        n.name for n in seen if n.op == "placeholder" and n.meta["role"].kind == "tangent"
    )


def _has_statistics(current: Any, graph: TrainingGraph) -> bool:
    return any(b.dtype.is_floating_point for b in graph.written_buffers)


state("bucketing", Statement(has_work=_has_elements))
state("participation", Statement(has_work=_has_choice))
state("running_stats", Statement(has_work=_has_statistics))
# A second run would find its payloads, which are buckets, and reduce them again.
state("gradient_sync", Statement(sync_tolerance, idempotent=False, has_work=_has_buckets))
