"""Put gradients into buckets, one flat tensor each, so that few large collectives carry them.

    before      mm_1 ──▶ output(weight_2)          after    mm_1 ─┐
                mm_3 ──▶ output(weight_1)                   mm_3 ─┴▶ cat = bucket0 ─┬▶ view ──▶ output(weight_2)
                                                                                    └▶ view ──▶ output(weight_1)

Before: any graph with gradient outputs. After: each non-empty gradient output is a view of a bucket, in
the physical layout it had. A bucket is filled in the order in which the backward makes gradients, and stands
right behind its last one, so that its collective can start while the rest is computed; the views stand at
the end. It comes before every pass that puts gradients on a wire.

After DDP's reducer (Li et al., VLDB 2020, "PyTorch Distributed"), without its hooks and its rebuilds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import fx

from fxpasses.compression import Levels, Rules, parse_rules, scheme_of
from fxpasses.graph import Gradient, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, model_line, splice


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What a flat node (`node.meta["bucket"]`) holds: parameters in order, and their gradients' shapes."""

    index: int
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    model_line: str

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each."""
        return tuple(map(math.prod, self.shapes))


@dataclasses.dataclass(frozen=True)
class Bucketing(Pass):
    """Options: `mb`, the target size of a bucket in MiB of gradient; `scheme`, which compression for which
    parameter, since a bucket has one. Environment: `layout`, the order of parameters that the ranks agreed on,
    where their graphs differ; `levels` of adaptive compression.
    """

    mb: float | None = from_environment("bucket_mb")
    scheme: str | None = from_environment("compression")
    layout: tuple[str, ...] | None = from_environment("layout")
    levels: tuple[tuple[str, str], ...] | None = from_environment("levels")

    name: ClassVar[str] = "bucketing"
    stage: ClassVar[str] = "backward"
    provides: ClassVar[frozenset[str]] = frozenset({"buckets"})

    def __post_init__(self) -> None:
        if self.mb is not None and not 0 < self.mb < math.inf:
            raise ValueError(
                f"option 'passes': bucketing{{mb={self.mb}}}: expected a positive number"
            )

    def has_work(self, graph: TrainingGraph) -> bool:
        return any(g.node.meta["val"].numel() for g in graph.gradients())

    def run(self, graph: TrainingGraph) -> Report:
        assert self.mb is not None
        rules = parse_rules(self.scheme or "")
        groups = assign(graph, self.mb * 2**20, self.layout, rules, self.levels)
        # Chosen before anything is inserted, so that buckets with one last gradient stand in order. With a
        # common layout behind all else: the graphs differ, and so would what stands between the buckets.
        places = [graph.behind(group[-1].node) for group in groups]
        if self.layout is not None:
            places = [graph.output_node] * len(groups)
        flats = [
            self._flat(graph, index, group, place)
            for index, (group, place) in enumerate(zip(groups, places, strict=True))
        ]
        views: dict[int, fx.Node] = {}
        for group, flat in zip(groups, flats, strict=True):
            views.update(self._views(graph, group, flat))
        graph.set_outputs(views)
        return Report(
            changed=bool(groups),
            counts={"buckets": len(groups), "gradients": sum(map(len, groups))},
        )

    def _flat(
        self, graph: TrainingGraph, index: int, group: list[Gradient], before: fx.Node
    ) -> fx.Node:
        """Write the flat tensor of one bucket."""
        last = group[-1].node
        parameters = tuple(g.parameter for g in group)
        permutations = self._permutations(group)
        flat = splice(
            graph,
            before,
            lambda grads: torch.cat(
                [_flatten(x, p) for x, p in zip(grads, permutations, strict=True)]
            ),
            [g.node for g in group],
            name=f"bucket{index}",
            provenance=Provenance("bucketing", "flatten", last.name, model_line(last), parameters),
        )
        shapes = tuple(tuple(g.node.meta["val"].shape) for g in group)
        flat.meta["bucket"] = Bucket(index, parameters, shapes, model_line(last))
        return flat

    def _views(
        self, graph: TrainingGraph, group: list[Gradient], flat: fx.Node
    ) -> dict[int, fx.Node]:
        """Write the views of one bucket; returns what becomes each output of its gradients."""
        bucket: Bucket = flat.meta["bucket"]
        permutations = self._permutations(group)
        views = splice(
            graph,
            graph.output_node,
            lambda x: [
                _unflatten(part, shape, p)
                for part, shape, p in zip(
                    x.split(bucket.numels), bucket.shapes, permutations, strict=True
                )
            ],
            flat,
            name=f"bucket{bucket.index}",
            provenance=dataclasses.replace(flat.meta["provenance"], rule="unflatten"),
        )
        return {gradient.index: view for gradient, view in zip(group, views, strict=True)}

    def _permutations(self, group: list[Gradient]) -> list[tuple[int, ...]]:
        """Where nobody else has to know the order, the physical one of each gradient: it then flattens without
        a copy. Other ranks (a common layout) and later steps (residuals of compression) have to.
        """
        if self.layout is not None or self.scheme:
            return [tuple(range(g.node.meta["val"].dim())) for g in group]
        return [_physical_order(g.node.meta["val"]) for g in group]


def assign(
    graph: TrainingGraph,
    bucket_bytes: float,
    layout: tuple[str, ...] | None = None,
    rules: Rules = (),
    levels: Levels | None = None,
) -> list[list[Gradient]]:
    """Gradients by bucket. A bucket closes once it holds `bucket_bytes`; one dtype, device and scheme a bucket.

    Args:
        layout: parameters in the order to go by; None is the order in which the graph makes gradients.
        rules, levels: which compression scheme for which parameter.
    """
    positions = graph.positions()
    order = {g.index: (positions[g.node], g.index) for g in graph.gradients()}
    if layout is not None:
        order = {g.index: (layout.index(g.parameter), 0) for g in graph.gradients()}
    gradients = sorted(graph.gradients(), key=lambda g: order[g.index])
    open_groups: dict[tuple[object, ...], list[Gradient]] = {}
    filled: dict[tuple[object, ...], int] = {}
    groups: list[list[Gradient]] = []
    for gradient in gradients:
        value = gradient.node.meta["val"]
        if value.layout != torch.strided:
            raise ValueError(
                f"the gradient of {gradient.parameter!r} is {value.layout}; the hardened backend reduces dense "
                "gradients only (for nn.Embedding: sparse=False)"
            )
        if value.numel() == 0:
            continue
        key = (value.dtype, value.device, scheme_of(gradient.parameter, rules, levels))
        open_groups.setdefault(key, []).append(gradient)
        filled[key] = filled.get(key, 0) + value.numel() * value.element_size()
        if filled[key] >= bucket_bytes:
            groups.append(open_groups.pop(key))
            del filled[key]
    groups += open_groups.values()
    return sorted(groups, key=lambda group: order[group[-1].index])


def _physical_order(value: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest, so that a dense gradient flattens without a copy."""
    logical = tuple(range(value.dim()))
    if value.is_contiguous():
        return logical
    physical = tuple(sorted(logical, key=value.stride, reverse=True))
    return physical if value.permute(physical).is_contiguous() else logical


def _flatten(value: torch.Tensor, permutation: tuple[int, ...]) -> torch.Tensor:
    return _permute(value, permutation).reshape(-1)


def _unflatten(
    flat: torch.Tensor, shape: tuple[int, ...], permutation: tuple[int, ...]
) -> torch.Tensor:
    inverse = tuple(sorted(range(len(shape)), key=permutation.__getitem__))
    return _permute(flat.view([shape[d] for d in permutation]), inverse)


def _permute(value: torch.Tensor, permutation: tuple[int, ...]) -> torch.Tensor:
    return value if permutation == tuple(range(len(permutation))) else value.permute(permutation)
