"""State of a forward: inputs and outputs that Dynamo's program does not know of.

    program(x, w) ─▶ y        after   program(x, w, state) ─▶ y, clone(state)

AOTAutograd fixes a forward's signature when it traces it, so what passes of the joint stage want to read and
write is declared before (`Pass.forward_states`), and stands in a copy of Dynamo's graph. A pass makes another
node that output's value; at run time `Calls` appends the states and takes the new values off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.aot import output_positions
from fxpasses.dynamo import copied_graph
from fxpasses.graph import Role, StateSpec, identifier
from fxpasses.passes.base import Pass


def states_of(passes: Iterable[Pass], example_inputs: Sequence[Any]) -> tuple[StateSpec, ...]:
    """The states that passes of the joint stage declare, where the program's tensors are."""
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    return tuple(spec for p in passes for spec in p.forward_states(device))


def add_states(
    gm: fx.GraphModule, example_inputs: Sequence[Any], specs: Sequence[StateSpec]
) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a Dynamo graph with states behind its inputs and outputs, and its example inputs."""
    if not specs:
        return gm, list(example_inputs)
    copy = copied_graph(gm)
    graph = copy.graph
    mode = torch._guards.TracingContext.get().fake_mode
    assert mode is not None, "Dynamo traces with fake tensors"
    zeros = (torch.zeros(s.shape, dtype=s.dtype, device=s.device) for s in specs)
    fakes = [mode.from_tensor(zero, static_shapes=True) for zero in zeros]
    new: list[fx.Node] = []
    for spec, fake in zip(specs, fakes, strict=True):
        before = [*graph.find_nodes(op="placeholder")]
        place = graph.inserting_after(before[-1]) if before else graph.inserting_before()
        with place:
            state = graph.placeholder("state_" + identifier(spec.name))
        state.meta["example_value"] = fake
        new.append(state)
    output = graph.output_node()
    with graph.inserting_before(output):
        clones = [graph.call_function(torch.clone, (state,)) for state in new]
    for clone, fake in zip(clones, fakes, strict=True):
        clone.meta["example_value"] = fake
    output.args = ((*output.args[0], *clones),)  # type: ignore[misc]
    copy.recompile()
    return copy, [*example_inputs, *fakes]


def annotate(module: fx.GraphModule, specs: Sequence[StateSpec]) -> None:
    """Write the roles of states to an annotated joint graph; theirs are the last outputs of Dynamo's graph."""
    if not specs:
        return
    by_name = {spec.name: spec for spec in specs}
    for node in module.graph.find_nodes(op="placeholder"):
        role = node.meta["role"]
        if role.kind == "state":
            node.meta["state"] = by_name[role.name]
    output = module.graph.output_node()
    roles = list(output.meta["roles"])
    positions = output_positions(module)
    for spec, at in zip(specs, sorted(positions)[-len(specs) :], strict=True):
        roles[positions[at]] = Role("state", spec.name)
    output.meta["roles"] = tuple(roles)
