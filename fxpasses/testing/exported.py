"""A `TrainingGraph` from an exported program.

Its signature says what each input and output is for, so the roles follow without any tracing of ours. A
training graph's buffer updates stand first among the outputs, in the program's order.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fxpasses.graph import Role, TrainingGraph

_INPUTS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "buffer",
    InputKind.USER_INPUT: "input",
}
_OUTPUTS = {
    OutputKind.USER_OUTPUT: "output",
    OutputKind.LOSS_OUTPUT: "output",
    OutputKind.BUFFER_MUTATION: "mutation",
    OutputKind.USER_INPUT_MUTATION: "mutation",
    OutputKind.PARAMETER_MUTATION: "mutation",
    OutputKind.GRADIENT_TO_PARAMETER: "gradient",
    OutputKind.GRADIENT_TO_USER_INPUT: "input_gradient",
}


def exported(program: ExportedProgram) -> TrainingGraph:
    """A copy of an exported program's graph, with roles. The program stays as it is.

    Args:
        program: functional: the result of `run_decompositions()`.

    Raises:
        ValueError: for inputs or outputs of a kind that a training graph does not have (tokens, objects).
    """
    module = copy.deepcopy(program.graph_module)
    inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in module.graph.find_nodes(op="placeholder"):
        spec = inputs[node.name]
        kind = _known(_INPUTS, spec.kind, node.name)
        node.meta["role"] = Role(kind, spec.target or node.name)
    output = module.graph.output_node()
    values = output.args[0]
    assert isinstance(values, list | tuple)
    output.args = (tuple(values),)
    output.meta["roles"] = tuple(
        Role(_known(_OUTPUTS, spec.kind, str(position)), spec.target or str(position))
        for position, spec in enumerate(program.graph_signature.output_specs)
    )
    return TrainingGraph(module)


def output_kinds(program: ExportedProgram) -> list[tuple[str, str | None]]:
    """(kind, target) of each output as the program's signature has it, in order."""
    return [(spec.kind.name, spec.target) for spec in program.graph_signature.output_specs]


def _known(kinds: dict[Any, str], kind: Any, name: str) -> str:
    if kind not in kinds:
        raise ValueError(
            f"exported program: {name!r} is a {kind.name}, which no training graph has"
        )
    return kinds[kind]
