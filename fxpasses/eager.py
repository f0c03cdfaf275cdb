"""The same unit without Inductor: AOTAutograd's graphs, run node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxpasses.calls import Calls
from fxpasses.step_calls import StepCalls
from fxpasses.unit import Unit


def compile_unit(
    gm: fx.GraphModule, example_inputs: Sequence[Any], unit: Unit
) -> Callable[..., Any]:
    """Run a Dynamo graph's forward and backward, passes applied, with eager kernels."""

    calls = StepCalls(unit) if unit.is_whole_step else Calls(unit)

    def forward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        unit.note_forward()
        return make_boxed_func(module.forward)

    def backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return calls.backward(_callable(module), lambda b: _callable(b.module))

    def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if isinstance(calls, StepCalls):
            step = unit.take_whole_step(module)
            return calls.step(_callable(step.module), lambda b: _callable(b.module))
        unit.inference(module)
        return make_boxed_func(module.forward)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return unit.partition(joint, joint_inputs, min_cut_rematerialization_partition, **kwargs)

    compile_graphs = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    with functorch_config.patch(backward_pass_autocast="off"):
        return calls.forward(compile_graphs(gm, example_inputs))


def _callable(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Run the module; gradients that are views of one bucket get version counters of their own, as Inductor's
    do: adding to one is not a write to the others.
    """

    def run(*args: Any) -> Any:
        return [x.data if isinstance(x, torch.Tensor) else x for x in module.forward(*args)]

    return make_boxed_func(run)
