"""Scale the loss inside the backward: tangents up, gradients down again.

    before   tangent ─▶ … ─▶ gradient       after   tangent ─▶ mul scale ─▶ … ─▶ mul 1/scale ─▶ gradient

Before: a backward. After: what lies between has `scale` times its value, so that small gradients don't vanish
in fp16; what leaves the graph, gradients of activations included, has its own value again, so that clipping
and hooks need to know nothing. A gradient that is a tangent, or that none reaches, has it all along and is left
alone. Both multiplications are done in fp32, the second with the correctly rounded reciprocal; what a
half-precision tangent is cast to first of all is cast from the product. A constant scale is a number in the
graph; a dynamic one is a state input (`"dynamic"`).

It runs in every backward, local ones too, and stands before whatever adds up or sends gradients.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.fakes import read_instead
from fxpasses.graph import SCALE_STATE, StateSpec, TrainingGraph, ancestors, tangents_reaching
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.precision import is_cast
from fxpasses.rewrite import Provenance, splice


@dataclasses.dataclass(frozen=True)
class LossScaling(Pass):
    """Options: `scale`, a number, or `dynamic` for the model's own (0: none)."""

    scale: float | str | None = from_environment("loss_scale_in_graph")

    name: ClassVar[str] = "loss_scale"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True
    preserves_numerics: ClassVar[bool] = False
    inexact: ClassVar[frozenset[str]] = frozenset({"gradient", "input_gradient"})
    idempotent: ClassVar[bool] = False  # it would scale once more

    def error_bound(self) -> str:
        return (
            "|out - g| <= 2 eps(fp32) |g| plus what the graph rounds, while nothing leaves the normal range; "
            "bitwise for a scale that is a power of two, where that holds"
        )

    def tolerance(self, local: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What another scale makes the graph round has no bound in terms of its results; what half precision
        flushes is below its smallest normal number.
        """
        dynamic = self.scale == "dynamic"  # drawn as a power of two
        power_of_two = dynamic or math.frexp(float(self.scale or 1))[0] == 0.5
        in_range = out.isfinite() & power_of_two
        return torch.where(in_range, torch.finfo(torch.float16).tiny, math.inf).double()

    def has_work(self, graph: TrainingGraph) -> bool:
        return bool(self.scale and _leaving(graph))

    def run(self, graph: TrainingGraph) -> Report:
        if self.scale and graph.gradients() and not graph.inputs("tangent"):
            raise ValueError(
                "option 'loss_scale': the compiled function calls backward() itself, so that its loss can't be "
                "scaled; call backward() outside of the compiled function"
            )
        leaving = _leaving(graph)
        if not self.scale or not leaving:
            return Report(changed=False)
        needed = ancestors(leaving.values())
        tangents = [node for node, _ in graph.inputs("tangent") if node in needed]
        before = graph.first_call
        scale, reciprocal = self._factors(graph, before, tangents[0].meta["val"].device)
        for tangent in tangents:
            readers = [user for user in tangent.users if user in needed]
            self._scale(graph, before, tangent, readers, scale)
        unscaled = {n: self._unscale(graph, n, reciprocal) for n in dict.fromkeys(leaving.values())}
        graph.set_outputs({i: unscaled[n] for i, n in leaving.items()})
        return Report(True, {"tangents": len(tangents), "gradients": len(leaving)})

    def _factors(
        self, graph: TrainingGraph, before: fx.Node, device: torch.device
    ) -> tuple[Any, Any]:
        """The scale and its reciprocal: numbers, or nodes."""
        assert self.scale is not None
        if self.scale != "dynamic":
            scale = float(self.scale)
            return scale, 1.0 / scale
        state = graph.add_state(StateSpec(SCALE_STATE, "", (), torch.float32, device))
        return state, splice(
            graph,
            before,  # over float64, since a fast reciprocal need not be correctly rounded
            lambda scale: scale.double().reciprocal().float(),
            state,
            name="unscale",
            provenance=Provenance(self.name, "reciprocal"),
        )

    def _scale(
        self,
        graph: TrainingGraph,
        before: fx.Node,
        tangent: fx.Node,
        readers: list[fx.Node],
        scale: Any,
    ) -> None:
        """Make what computes gradients of a tangent read its multiple: casts before it is rounded."""
        casts = [reader for reader in readers if is_cast(reader)]
        others = [reader for reader in readers if not is_cast(reader)]

        def products(x: torch.Tensor, scale: Any) -> list[torch.Tensor]:
            product = _product(x, scale)
            return [product, *([product.to(x.dtype)] if others else [])]

        exact, *rounded = splice(
            graph,
            before,
            products,
            tangent,
            scale,
            name=f"scaled_{tangent.name}",
            provenance=Provenance(self.name, "scale", tangent.name),
        )
        read_instead(graph, casts, tangent, exact)
        if others:
            read_instead(graph, others, tangent, rounded[0])

    def _unscale(self, graph: TrainingGraph, node: fx.Node, reciprocal: Any) -> fx.Node:
        return splice(
            graph,
            graph.behind(node),
            lambda x, reciprocal: _product(x, reciprocal).to(x.dtype),
            node,
            reciprocal,
            name=f"unscaled_{node.name}",
            provenance=Provenance(self.name, "unscale", node.name),
        )


def _product(x: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """In fp32 at least, not yet rounded to what is less."""
    return x.float() * factor if x.dtype.itemsize < 4 else x * factor


def _leaving(graph: TrainingGraph) -> dict[int, fx.Node]:
    """The gradients that are made of tangents, those of inputs too, by index among the outputs."""
    reach = tangents_reaching(graph)
    outputs = graph.outputs("gradient") + graph.outputs("input_gradient")
    made = ((i, n) for i, n, _ in outputs if isinstance(n, fx.Node) and n.op != "placeholder")
    return {i: node for i, node in made if reach[node]}
