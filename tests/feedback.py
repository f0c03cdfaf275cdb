"""A third party's pass with state: gradients rounded to integers, with error feedback."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import nn

from fxpasses import Pass, Report, TrainingGraph, register_pass, runtime, splice
from fxpasses.graph import StateSpec
from fxpasses.rewrite import Provenance


@register_pass
@dataclasses.dataclass(frozen=True)
class RoundWithFeedback(Pass):
    """gradient → round(gradient + residual); what rounding lost is the next residual."""

    name: ClassVar[str] = "round_with_feedback"
    stage: ClassVar[str] = "backward"
    preserves_numerics: ClassVar[bool] = False

    def error_bound(self) -> str:
        return "|out - g| <= 0.5 + |residual|"

    def run(self, graph: TrainingGraph) -> Report:
        gradients = graph.gradients()
        for gradient in gradients:
            value = gradient.node.meta["val"]
            spec = StateSpec(
                "residual", gradient.parameter, tuple(value.shape), value.dtype, value.device
            )
            sent, residual = splice(
                graph,
                graph.output_node,
                _round,
                gradient.node,
                graph.add_state(spec),
                name=f"round_{gradient.index}",
                provenance=Provenance(self.name, "round", parameters=(gradient.parameter,)),
            )
            graph.set_output(gradient.index, sent)
            graph.write_state(spec.name, residual)
        return Report(changed=bool(gradients))


def _round(gradient: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = gradient + residual
    sent = total.round()
    return sent, total - sent


class Feedback:
    """The residuals of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.runtime = runtime(module)

    def residual(self, parameter: str) -> torch.Tensor:
        return self.runtime.state_dict()["state"][f"residual/{parameter}"]
