"""The ways in which one backward may run: the same computation, with other communication.

    synchronise   gradient ─────────────────▶ bucket ─▶ reduced
    total         gradient + pending ───────▶ bucket ─▶ reduced     pending: accumulated in `.grad` so far
    local         gradient ─────────────────────────▶ as it is      pending afterwards
    left                     pending ───────▶ bucket ─▶ reduced     no computation: what micro-batches left

Where ranks' graphs differ, parameters that are absent from this rank's graph are added as gradients: zeros, or
what is pending of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx

from fxpasses.compression import Levels
from fxpasses.distributed.plans import Union
from fxpasses.graph import PENDING_STATE, Gradient, Role, StateSpec, TrainingGraph
from fxpasses.rewrite import Provenance, splice

SYNCHRONISE, TOTAL, LOCAL, LEFT = "synchronise", "total", "local", "left"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run a backward.

    Attributes:
        mode: `"synchronise"`, `"total"`, `"local"` or `"left"`.
        union: what the ranks agreed to send, where their graphs differ.
        absent: for each parameter of the union that this rank's graph lacks, its pending gradient.
        buffers: the union's buffers.
        levels: of compression that changes; None where nothing is sent, or none does.
    """

    mode: str = SYNCHRONISE
    union: Union | None = None
    absent: tuple[StateSpec, ...] = ()
    buffers: tuple[StateSpec, ...] = ()
    levels: Levels | None = None

    @property
    def layout(self) -> tuple[str, ...] | None:
        """The agreed order of parameters; None where the ranks' graphs agree by themselves."""
        return None if self.union is None else tuple(form.name for form in self.union.parameters)


def pending_of(name: str, tensor: torch.Tensor) -> StateSpec:
    """The input that holds what is pending of a parameter's gradient."""
    return StateSpec(PENDING_STATE, name, tuple(tensor.shape), tensor.dtype, tensor.device)


def prepare(graph: TrainingGraph, variant: Variant) -> None:
    """Give a backward the inputs and outputs of a variant, before any pass sees it."""
    if variant.mode == TOTAL:
        for gradient in graph.gradients():
            if gradient.node.meta["val"].numel():
                _add_pending(graph, gradient)
    add_absent(graph, variant)


def add_absent(graph: TrainingGraph, variant: Variant) -> None:
    """Give a backward what it lacks and other ranks have."""
    for spec in variant.absent:
        graph.add_output(graph.add_state(spec), Role("gradient", spec.parameter))
    if variant.union is not None:
        graph.module.meta["written_buffers"] = variant.buffers
        _add_read_buffers(graph, variant.buffers)


def _add_read_buffers(graph: TrainingGraph, buffers: Iterable[StateSpec]) -> None:
    """In a graph that holds the forward too, a buffer that others write may be one that this one reads."""
    inputs = {role.name: node for node, role in graph.inputs("buffer")}
    written = {role.name for _, _, role in graph.outputs("mutation")}
    for spec in buffers:
        if spec.parameter in inputs and spec.parameter not in written:
            graph.add_output(inputs[spec.parameter], Role("mutation", spec.parameter))


def _add_pending(graph: TrainingGraph, gradient: Gradient) -> None:
    pending = graph.add_state(pending_of(gradient.parameter, gradient.node.meta["val"]))
    total: fx.Node = splice(
        graph,
        graph.behind(gradient.node),
        torch.add,
        gradient.node,
        pending,
        name=f"total{gradient.index}",
        provenance=Provenance(
            "accumulation", "total", gradient.node.name, parameters=(gradient.parameter,)
        ),
    )
    graph.set_output(gradient.index, total)
