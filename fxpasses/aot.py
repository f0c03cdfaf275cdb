"""What we need of AOTAutograd internals (`torch._functorch`). Checked on torch 2.11, 2.13 and 2.14.

Sources: `torch/_functorch/_aot_autograd/descriptors.py` (what each input and output is),
`torch/_functorch/partitioners.py` (how a joint graph is split), `.../runtime_wrappers.py` (the
autograd function that runs the two halves).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._guards import detect_fake_mode
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_with_rng_state

from fxpasses.graph import BUFFER_STATE, Role, StateSpec

TANGENT_PREFIX = "tangents_"


def is_whole_joint(module: fx.GraphModule) -> bool:
    """Whether this is the joint graph of a compilation, not of a region inside one (no descriptors)."""
    placeholders = module.graph.find_nodes(op="placeholder")
    return bool(placeholders) and all("desc" in n.meta for n in placeholders)


def annotate_joint(
    module: fx.GraphModule, forward_outputs: int, input_roles: Sequence[Role]
) -> None:
    """Write roles to a joint graph.

    Args:
        forward_outputs: how many of its outputs belong to the forward.
        input_roles: role of each input of the program that was traced, by position.
    """
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["role"] = _input_role(node.meta["desc"], node.name, input_roles)
    output = module.graph.output_node()
    descriptors = output.meta["desc"]
    output.meta["roles"] = tuple(
        _output_role(desc, position, position < forward_outputs, input_roles)
        for position, desc in enumerate(descriptors)
    )


def _input_role(desc: Any, name: str, input_roles: Sequence[Role]) -> Role:
    if isinstance(desc, TangentAOTInput):
        return Role("tangent", name)
    if isinstance(desc, ParamAOTInput):
        return Role("parameter", desc.target)
    if isinstance(desc, BufferAOTInput):
        return Role("buffer", desc.target)
    if isinstance(desc, PlainAOTInput):
        return input_roles[desc.idx]
    return Role("input", name)


def _output_role(desc: Any, position: int, forward: bool, input_roles: Sequence[Role]) -> Role:
    if isinstance(desc, GradAOTOutput):
        of = _input_role(desc.grad_of, f"input_{position}", input_roles)
        return Role("gradient" if of.kind == "parameter" else "input_gradient", of.name)
    if isinstance(desc, InputMutationAOTOutput):
        return Role(
            "mutation", _input_role(desc.mutated_input, f"input_{position}", input_roles).name
        )
    return Role("output" if forward else "input_gradient", f"{position}")


def output_positions(module: fx.GraphModule) -> dict[int, int]:
    """Among the outputs of a joint graph, where each output of the program that was traced stands."""
    descriptors = enumerate(module.graph.output_node().meta["desc"])
    return {desc.idx: at for at, desc in descriptors if isinstance(desc, PlainAOTOutput)}


def written_buffers(joint: fx.GraphModule) -> tuple[StateSpec, ...]:
    """Buffers that a joint graph writes: by an output, or by a `copy_` that AOTAutograd left inside."""
    buffers = {
        node.meta["role"].name: node
        for node in joint.graph.find_nodes(op="placeholder")
        if node.meta["role"].kind == "buffer"
    }
    roles = joint.graph.output_node().meta["roles"]
    written = {role.name for role in roles if role.kind == "mutation"}
    copies = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written |= {name for name, node in buffers.items() if any(c.args[0] is node for c in copies)}
    values = {name: node.meta["val"] for name, node in buffers.items() if name in written}
    return tuple(
        StateSpec(BUFFER_STATE, name, tuple(v.shape), v.dtype, v.device)
        for name, v in values.items()
    )


def annotate_backward(module: fx.GraphModule, joint: fx.GraphModule, forward_outputs: int) -> None:
    """Write roles to the backward half of an annotated joint graph, and which buffers the forward writes."""
    module.meta["written_buffers"] = written_buffers(joint)
    for node in module.graph.find_nodes(op="placeholder"):
        kind = "tangent" if node.name.startswith(TANGENT_PREFIX) else "saved"
        node.meta["role"] = Role(kind, node.name)
    output_roles = joint.graph.output_node().meta["roles"]
    module.graph.output_node().meta["roles"] = tuple(output_roles[forward_outputs:])
    for target in (run_with_rng_state, graphsafe_run_with_rng_state):
        for node in module.graph.find_nodes(op="call_function", target=target):
            _add_value(node)


def _add_value(node: fx.Node) -> None:
    """The partitioner gives none to an operator that draws the forward's random numbers again."""
    values: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = values
    kwargs = {key: value for key, value in kwargs.items() if key != "rng_state"}
    while not isinstance(args[0], torch._ops.OpOverload):
        args = args[1:]  # the state
    operator, *args = args
    mode = detect_fake_mode(args)
    assert mode is not None, "AOTAutograd traces with fake tensors"
    with mode:
        node.meta["val"] = operator(*args, **kwargs)


def annotate_whole_step(module: fx.GraphModule, input_roles: Sequence[Role]) -> None:
    """Write roles to a graph that holds forward and backward, and which buffers it writes."""
    outputs = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
    annotate_joint(module, outputs, input_roles)
    module.meta["written_buffers"] = written_buffers(module)


def rename_state_input(node: fx.Node) -> None:
    """Give a state input a tangent's name: AOTAutograd and Inductor expect saved values, then tangents,
    and tell them apart by name.
    """
    node._rename(TANGENT_PREFIX + node.name)


def returned_positions(tangents: Iterable[fx.Node], metadata: Any) -> tuple[int | None, ...]:
    """For each tangent the position, among what the autograd function returned, that it belongs to.

    None where that can't be told: such a tangent counts as always given.
    """
    mutated_inputs, outputs = metadata.num_mutated_inp_runtime_indices, metadata.num_outputs
    positions: list[int | None] = []
    bases = 0
    for node in tangents:
        of = (
            node.meta["desc"].output if isinstance(node.meta.get("desc"), TangentAOTInput) else None
        )
        if isinstance(of, PlainAOTOutput):
            positions.append(mutated_inputs + of.idx)
        elif isinstance(of, IntermediateBaseAOTOutput):
            positions.append(mutated_inputs + outputs + bases)
            bases += 1
        elif isinstance(of, InputMutationAOTOutput) and isinstance(of.mutated_input, PlainAOTInput):
            written = list(metadata.mutated_inp_runtime_indices)
            index = of.mutated_input.idx
            positions.append(written.index(index) if index in written else None)
        else:
            positions.append(None)
    return tuple(positions)


def forward_metadata() -> Any:
    """What AOTAutograd knows of the forward that is being compiled (`ViewAndMutationMeta`)."""
    context = torch._guards.TracingContext.try_get()
    return None if context is None else context.fw_metadata


def backward_id() -> int:
    """Identity of the call of `backward()` that is running."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call this when the call of `backward()` that is running is over; what it raises, that call raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def autograd_clock() -> int:
    """A number that autograd nodes made from now on, in this thread, don't fall short of."""
    return torch.autograd._get_sequence_nr()


def autograd_node(tensors: Iterable[Any], metadata: Any, since: int) -> Any:
    """The autograd node behind returned tensors that runs the backward compiled with `metadata`.

    Outputs that are views or written inputs hang a few nodes below their own `grad_fn`.

    Args:
        since: `autograd_clock()` before the call; older nodes belong to other calls.
    """
    seen: set[Any] = set()
    pending = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor)]
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and getattr(function, "metadata", None) is metadata:
            return node
        pending += [following for following, _ in node.next_functions]
    return None


def is_batched(tensor: Any) -> bool:
    """Whether a tensor stands for a batch of tensors (`torch.vmap`, `is_grads_batched=True`)."""
    functorch = torch._C._functorch
    return isinstance(tensor, torch.Tensor) and (
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )
