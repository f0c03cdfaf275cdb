"""Scale gradients down to a limit of their global norm, where they are written out.

    before   reduced buckets ─▶ views     after   reduced buckets ─┬▶ norms ─▶ norm ─▶ factor ─┐
                                                                   └───────────────────────────┴▶ mul ─▶ views

Before: a backward whose gradients are reduced; every rank has the same. After: each gradient is multiplied by
min(1, limit / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does; the norm is a state output, the limit a
state input. No further collective, and one multiplication for a whole bucket, which fuses with a cast from the
wire's dtype. A norm that is not finite makes all gradients NaN: nobody steps on a part of them.

It stands behind the reduction, since norms of parts don't add up over ranks. Whether the graph holds all
gradients of a step is checked where that is known, at run time (`clipping.py`).

After Pascanu et al., "On the difficulty of training recurrent neural networks" (2013).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import fx

from fxpasses.finite import is_inexact
from fxpasses.graph import LIMIT_STATE, NORM_STATE, Gradient, StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class ClipNorm(Pass):
    """Options: `max_norm`, where the limit starts. Environment: `world`, the number of ranks.

    Norms are taken in fp32, or in fp64 of gradients that are.
    """

    max_norm: float | None = from_environment("clip_norm")
    world: int | None = from_environment("world")

    name: ClassVar[str] = "clip_norm"
    stage: ClassVar[str] = "backward"
    provides: ClassVar[frozenset[str]] = frozenset({"clipped"})
    preserves_numerics: ClassVar[bool] = False
    idempotent: ClassVar[bool] = False  # the second norm is that of clipped gradients

    def __post_init__(self) -> None:
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ValueError(
                f"option 'passes': clip_norm{{max_norm={self.max_norm}}}: expected a positive number"
            )

    def error_bound(self) -> str:
        return (
            "|out - f g| <= n eps(fp32) |f g| + eps(gradient dtype) |out| with f = min(1, limit / (norm + "
            "1e-6)) and n elements in all; NaN where the norm is not finite in fp32"
        )

    def tolerance(self, local: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Of one gradient, whatever the others are: it becomes smaller, or NaN."""
        eps = torch.finfo(out.dtype).eps
        bound = (1 + eps) * local.abs().amax(0).double()
        return torch.where(out.isnan(), torch.inf, bound)

    def has_work(self, graph: TrainingGraph) -> bool:
        return bool(_measured(graph))

    def run(self, graph: TrainingGraph) -> Report:
        gradients = _measured(graph)
        if not gradients:
            return Report(changed=False)
        self._check(graph)
        parts = _parts(gradients)
        factor = self._factor(graph, parts)
        written: dict[int, fx.Node] = {}
        for part in parts:
            scaled = splice(
                graph,
                graph.output_node,
                _times,
                part.node,
                factor,
                name=f"clipped_{part.node.name}",
                provenance=Provenance(
                    self.name, "multiply", part.node.name, parameters=part.parameters
                ),
            )
            if "reduced_bucket" in part.node.meta:
                scaled.meta["reduced_bucket"] = part.node.meta["reduced_bucket"]
            written |= _views(graph, part, scaled)
        graph.set_outputs(written)
        graph.eliminate_dead_code()
        return Report(True, {"norms": len(parts), "gradients": len(gradients)})

    def _check(self, graph: TrainingGraph) -> None:
        if self.max_norm is None:
            raise ValueError(
                "option 'passes': 'clip_norm' has no limit; write clip_norm{max_norm=1.0}, or set option "
                "'clip_norm'"
            )
        is_reduced = any(node.meta.get("reduces") for node in graph.walk())
        if self.world is not None and self.world > 1 and not is_reduced:
            raise ValueError(
                "option 'passes': 'clip_norm' needs reduced gradients; put it behind 'gradient_sync'"
            )

    def _factor(self, graph: TrainingGraph, parts: Sequence[_Part]) -> fx.Node:
        """What all gradients are multiplied by. The norm is written to its state."""
        device = parts[0].node.meta["val"].device
        assert self.max_norm is not None
        limit = StateSpec(LIMIT_STATE, "", (), torch.float32, device, self.max_norm)
        norm = StateSpec(NORM_STATE, "", (), torch.float32, device)
        graph.add_state(norm)
        measured, factor = splice(
            graph,
            graph.output_node,
            _norm_and_factor,
            [part.node for part in parts],
            graph.add_state(limit),
            name="norm",
            provenance=Provenance(self.name, "norm"),
        )
        graph.write_state(norm.name, measured)
        return factor


@dataclasses.dataclass(frozen=True)
class _Part:
    """A reduced bucket all of which is gradients, or a gradient in no such bucket.

    Attributes:
        node: all of it, in one piece.
        gradients: whose elements these are, each once.
        views: the nodes on the ways from there to the gradients, in no order.
    """

    node: fx.Node
    gradients: list[Gradient]
    views: list[fx.Node]

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(g.parameter for g in self.gradients)


def _measured(graph: TrainingGraph) -> list[Gradient]:
    values = [(gradient, gradient.node.meta["val"]) for gradient in graph.gradients()]
    return [g for g, v in values if v.numel() and is_inexact(v)]


def _parts(gradients: Sequence[Gradient]) -> list[_Part]:
    found: dict[fx.Node, _Part] = {}
    alone: list[_Part] = []
    for gradient in gradients:
        node, views = gradient.node, []
        while "reduced_bucket" not in node.meta and _is_view(node):
            views.append(node)
            (node,) = node.all_input_nodes
        alone.append(_Part(gradient.node, [gradient], []))
        if "reduced_bucket" in node.meta:
            part = found.setdefault(node, _Part(node, [], []))
            part.gradients.append(gradient)
            part.views.extend(views)
    whole = [
        p for p in found.values() if _numel(p.node) == sum(_numel(g.node) for g in p.gradients)
    ]
    inside = {g.index for part in whole for g in part.gradients}
    return whole + [part for part in alone if part.gradients[0].index not in inside]


def _numel(node: fx.Node) -> int:
    return node.meta["val"].numel()


def _is_view(node: fx.Node) -> bool:
    """Whether it is (one of) the views that an operator returns of its only input."""
    if len(node.all_input_nodes) != 1:
        return False
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and all(
        result.alias_info is not None for result in node.target._schema.returns
    )


def _views(graph: TrainingGraph, part: _Part, scaled: fx.Node) -> dict[int, fx.Node]:
    """The gradients of a part as views of `scaled`, by output. Who else reads the old views keeps them."""
    order = graph.positions()
    env = {part.node: scaled}
    with graph.graph.inserting_before(graph.output_node):
        for node in sorted(set(part.views), key=order.__getitem__):
            env[node] = graph.graph.node_copy(node, env.__getitem__)
    return {gradient.index: env[gradient.node] for gradient in part.gradients}


def _norm_and_factor(
    parts: Sequence[torch.Tensor], limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = [_norm(part).to(limit.device) for part in parts]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    factor = (limit / (norm + 1e-6)).clamp(0.0, 1.0)
    single = norm.float()
    # Not `nan` as a number, which a dumped graph would lack a name for.
    return single, torch.where(single.isfinite(), factor, single - single)


def _norm(part: torch.Tensor) -> torch.Tensor:
    is_half = part.dtype.itemsize < 4
    return torch.linalg.vector_norm(part, dtype=torch.float32 if is_half else None)


def _times(part: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    factor = factor.to(part.device)
    if part.dtype.itemsize < 4:
        return (part.float() * factor).to(part.dtype)
    return (part * factor).to(part.dtype)
