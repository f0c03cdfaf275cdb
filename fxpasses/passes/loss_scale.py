"""Scale the loss inside the backward: tangents up, gradients down again.

    before   tangent ─▶ … ─▶ gradient       after   tangent ─▶ mul scale ─▶ … ─▶ mul 1/scale ─▶ gradient

Before: a backward. After: what lies between has `scale` times its value, so that small gradients don't vanish
in fp16; what leaves the graph, gradients of activations included, has its own value again, so that clipping
and hooks need to know nothing. Both multiplications are done in fp32, the second with the correctly rounded
reciprocal. A constant scale is a number in the graph; a dynamic one is a state input (`"dynamic"`).

It runs in every backward, local ones too, and stands before whatever adds up or sends gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graph import SCALE_STATE, StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class LossScaling(Pass):
    """Options: `scale`, a number, or `dynamic` for the model's own (0: none)."""

    scale: float | str | None = from_environment("loss_scale_in_graph")

    name: ClassVar[str] = "loss_scale"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True
    preserves_numerics: ClassVar[bool] = False

    def error_bound(self) -> str:
        return (
            "|out - g| <= 2 eps(fp32) |g| plus what the graph rounds, while nothing leaves the normal range; "
            "bitwise for a scale that is a power of two, where that holds"
        )

    def run(self, graph: TrainingGraph) -> Report:
        floating = [n for n, _ in graph.inputs("tangent") if _is_floating(n)]
        outputs = graph.outputs("gradient") + graph.outputs("input_gradient")
        leaving = {i: n for i, n, _ in outputs if isinstance(n, fx.Node) and _is_floating(n)}
        if leaving and self.scale and not graph.inputs("tangent"):
            raise ValueError(
                "option 'loss_scale': the compiled function calls backward() itself, so that its loss can't be "
                "scaled; call backward() outside of the compiled function"
            )
        if not floating or not leaving or not self.scale:
            return Report(changed=False)
        state = self._state(graph, floating[0].meta["val"].device)
        self._scale(graph, floating, state)
        reads: dict[fx.Node, fx.Node] = {}
        for index, node in leaving.items():
            node = graph.outputs()[index][
                1
            ]  # a tangent that is returned as it came was scaled by now
            reads.setdefault(node, self._unscaled(graph, node, state))
            leaving[index] = reads[node]
        graph.set_outputs(leaving)
        return Report(True, {"tangents": len(floating), "gradients": len(leaving)})

    def _state(self, graph: TrainingGraph, device: torch.device) -> Any:
        if self.scale != "dynamic":
            return float(self.scale or 0)
        return graph.add_state(StateSpec(SCALE_STATE, "", (), torch.float32, device))

    def _scale(self, graph: TrainingGraph, tangents: list[fx.Node], state: Any) -> None:
        before = graph.first_call
        for tangent in tangents:
            users = list(tangent.users)
            scaled = splice(
                graph,
                before,
                lambda x, s: (x.float() * s).to(x.dtype) if x.dtype.itemsize < 4 else x * s,
                tangent,
                state,
                name=f"scaled_{tangent.name}",
                provenance=Provenance(self.name, "scale", tangent.name),
            )
            for user in users:
                user.replace_input_with(tangent, scaled)

    def _unscaled(self, graph: TrainingGraph, node: fx.Node, state: Any) -> fx.Node:
        return splice(
            graph,
            graph.behind(node),
            _times_reciprocal,
            node,
            state,
            name=f"unscaled_{node.name}",
            provenance=Provenance(self.name, "unscale", node.name),
        )


def _times_reciprocal(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    if isinstance(scale, float):
        reciprocal: Any = 1.0 / scale
    else:  # over float64, since a fast reciprocal need not be correctly rounded
        reciprocal = scale.double().reciprocal().float()
    return (x.float() * reciprocal).to(x.dtype) if x.dtype.itemsize < 4 else x * reciprocal


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
