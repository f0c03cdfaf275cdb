"""The same unit without Inductor: AOTAutograd's graphs, run node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
        return calls.backward(
            make_boxed_func(module.forward), lambda b: make_boxed_func(b.module.forward)
        )

    def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if isinstance(calls, StepCalls):
            step = unit.take_whole_step(module)
            return calls.step(
                make_boxed_func(step.module.forward), lambda b: make_boxed_func(b.module.forward)
            )
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
