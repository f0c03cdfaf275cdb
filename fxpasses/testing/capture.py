"""Get the graphs that passes work on, without compiling or running anything."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxpasses import aot
from fxpasses.dynamo import describe_inputs, mark_precision
from fxpasses.graph import TrainingGraph

_count = itertools.count()


@dataclasses.dataclass(frozen=True)
class Captured:
    """The joint graph of a program and its backward half, untouched by any pass."""

    joint: TrainingGraph
    backward: TrainingGraph


def capture(
    program: Callable[..., Any],
    *args: Any,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Captured:
    """Trace a module or function, as torch.compile would, into the graphs that passes see.

    Args:
        program: has no graph break and returns a tensor that requires grad.
        args: example inputs.
        decompositions: what is to be decomposed, as in front of Inductor (`inductor.decompositions()`).

    Raises:
        ValueError: when the program records no backward.
    """
    found: list[Captured] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        mark_precision(gm)
        _, roles = describe_inputs(gm, example_inputs)

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            aot.annotate_joint(joint, kwargs["num_fwd_outputs"], roles)
            forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
            aot.annotate_backward(backward, joint, kwargs["num_fwd_outputs"])
            pair = (copy.deepcopy(graph) for graph in (joint, backward))
            graphs = (TrainingGraph(graph, decompositions) for graph in pair)
            found.append(Captured(*graphs))
            return forward, backward

        def run(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return make_boxed_func(module.forward)

        compile_graphs = aot_autograd(
            fw_compiler=run,
            bw_compiler=run,
            partition_fn=partition,
            decompositions=decompositions or {},
        )
        with functorch_config.patch(backward_pass_autocast="off"):  # as the backend traces it
            return compile_graphs(gm, example_inputs)

    def call(*xs: Any) -> Any:  # a call of a module: its hooks and its own frame are traced as well
        return program(*xs)

    # A code of its own: what Dynamo remembers, it remembers by the name of the code.
    code = call.__code__.replace(co_name=f"capture_{next(_count)}")
    fresh = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    torch.compile(fresh, backend=backend, fullgraph=True)(*args)
    if not found:
        raise ValueError("the program records no backward: no input or parameter requires grad")
    return found[-1]
