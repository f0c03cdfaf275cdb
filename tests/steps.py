"""Whole steps as graphs, for tests."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from fxpasses import aot, marking
from fxpasses.dynamo import describe_inputs, forget_none, gradients_held

_count = itertools.count()


def marked(step: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Dynamo's graph of a function that calls backward(), as it was, and with markers."""
    found: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        forget_none()
        _, roles = describe_inputs(gm, example_inputs)
        found.append((gm, marking.mark(gm, roles, gradients_held(gm))))
        return gm.forward

    _compile(step, backend, args)
    return found[-1]


@dataclasses.dataclass(frozen=True)
class Traced:
    """The ATen graph of a function that calls backward(), with markers and roles, and its real inputs."""

    module: fx.GraphModule
    inputs: list[torch.Tensor]


def traced_step(step: Callable[..., Any], *args: Any) -> Traced:
    """Trace a function, without running it."""
    found: list[Traced] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        forget_none()
        _, roles = describe_inputs(gm, example_inputs)
        gm = marking.mark(gm, roles, gradients_held(gm))

        def keep(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            aot.annotate_whole_step(module, roles)

            def run(*inputs: torch.Tensor) -> list[None]:
                found.append(Traced(module, list(inputs)))
                return [None] * len(module.graph.output_node().args[0])  # type: ignore[arg-type]

            return make_boxed_func(run)

        return aot_autograd(
            fw_compiler=keep, inference_compiler=keep, keep_inference_input_mutations=True
        )(gm, example_inputs)

    _compile(step, backend, args)
    return found[-1]


def _compile(step: Callable[..., Any], backend: Callable[..., Any], args: Sequence[Any]) -> None:
    # A code of its own: what Dynamo remembers, it remembers by the name of the code.
    name = f"{step.__name__}_{next(_count)}"
    code = step.__code__.replace(co_name=name)
    fresh = types.FunctionType(code, step.__globals__, name, None, step.__closure__)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(fresh, backend=backend, fullgraph=True)(*args)
