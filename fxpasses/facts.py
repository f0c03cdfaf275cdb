"""What is known of a backward graph, and what it sends: ranks compare it before they train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import fx

from fxpasses.distributed.plans import Form, PlannedCollective
from fxpasses.effects import is_launch
from fxpasses.graph import TrainingGraph, tangents_reaching
from fxpasses.passes.participation import flagged_outputs
from fxpasses.rewrite import Provenance, model_line
from fxpasses.sizes import depends_on_data


@dataclasses.dataclass(frozen=True)
class Facts:
    """What holds of a backward whatever its variant.

    Attributes:
        flagged: for each output that is a gradient the tangents that it depends on, if any.
        gradients: parameter → the output that is its gradient.
        parameters: the forms of these gradients, in output order.
        buffers: the buffers that the forward writes.
    """

    flagged: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    gradients: Mapping[str, int] = dataclasses.field(default_factory=dict)
    parameters: tuple[Form, ...] = ()
    buffers: tuple[Form, ...] = ()


def facts_of(graph: TrainingGraph) -> Facts:
    """Of a backward, or of a whole step's head, before its passes run."""
    return Facts(
        flagged=flagged_outputs(graph, tangents_reaching(graph)),
        gradients={g.parameter: g.index for g in graph.gradients()},
        parameters=tuple(
            dataclasses.replace(
                form_of(g.parameter, g.node.meta["val"]), model_line=model_line(g.node)
            )
            for g in graph.gradients()
        ),
        buffers=tuple(
            Form(spec.parameter, spec.shape, _short(spec.dtype)) for spec in graph.written_buffers
        ),
    )


def form_of(name: str, value: torch.Tensor) -> Form:
    """A tensor, or the value of a node, as all ranks must see it."""
    strides = sorted(range(value.dim()), key=value.stride, reverse=True)
    return Form(name, tuple(map(int, value.shape)), _short(value.dtype), tuple(strides))


def planned_collectives(graph: TrainingGraph) -> tuple[PlannedCollective, ...]:
    """The launches of a graph, in order."""
    return tuple(_planned(node) for node in graph.walk() if is_launch(node))


def _planned(node: fx.Node) -> PlannedCollective:
    payload = node.args[0]
    assert isinstance(payload, fx.Node)
    value = payload.meta["val"]
    provenance = node.meta.get("provenance") or Provenance(
        "program", "", node.name, model_line(node)
    )
    numel = 0 if depends_on_data(value.numel()) else int(value.numel())
    return PlannedCollective(
        operator=node.target._opname,  # type: ignore[union-attr]
        group=str(node.args[-1]),
        dtype=_short(value.dtype),
        numel=numel,
        bytes=numel * value.element_size(),
        parameters=provenance.parameters,
        model_line=provenance.model_line,
        made_by=provenance.pass_name,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
