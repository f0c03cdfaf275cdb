"""A `TrainingGraph` from an exported program, and back.

Its signature says what each input and output is for, so the roles follow without any tracing of ours. A
training graph's buffer updates stand first among the outputs, in the program's order.

`ExportedProgram._update` is private; checked on torch 2.13.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fxpasses.graph import Role, TrainingGraph, copied
from fxpasses.precision import operator_name

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
    module = copied(program.graph_module)
    placeholders = module.graph.find_nodes(op="placeholder")  # a copy may have renamed them
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
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


def updated(program: ExportedProgram, graph: TrainingGraph) -> ExportedProgram:
    """The program with what passes made of `exported(program)`; its signature keeps kinds and targets.

    Raises:
        ValueError: when a pass has added state, which only a training run holds.
    """
    if graph.inputs("state"):
        names = ", ".join(role.name for _, role in graph.inputs("state"))
        raise ValueError(f"exported program: passes added state ({names}), which a file can't hold")
    old = program.graph_signature
    inputs = zip(old.input_specs, graph.inputs(), strict=True)
    outputs = zip(old.output_specs, graph.outputs(), strict=True)
    signature = dataclasses.replace(
        old,
        input_specs=[_of(spec, node) for spec, (node, _) in inputs],
        output_specs=[_of(spec, node) for spec, (_, node, _) in outputs],
    )
    graph.recompile()
    return program._update(graph.module, signature)


def _of(spec: Any, node: Any) -> Any:
    """A spec of the signature, for this node."""
    if not isinstance(node, fx.Node):
        return spec
    return dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=node.name))


def specialisation(program: ExportedProgram) -> str:
    """`"train"` if it does what modules do in training mode only, else `"eval"`. Export fixes this: neither
    can be turned into the other.
    """
    return "train" if any(map(_trains, program.graph.nodes)) else "eval"


def _trains(node: fx.Node) -> bool:
    """Whether it says so itself, or drops out whole channels. (A norm without statistics always says so.)"""
    if operator_name(node) in ("bernoulli", "_native_batch_norm_legit"):
        return operator_name(node) == "bernoulli"
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("train") or given.get("training"))


def output_kinds(program: ExportedProgram) -> list[tuple[str, str | None]]:
    """(kind, target) of each output as the program's signature has it, in order."""
    return [(spec.kind.name, spec.target) for spec in program.graph_signature.output_specs]


def _known(kinds: dict[Any, str], kind: Any, name: str) -> str:
    if kind not in kinds:
        raise ValueError(
            f"exported program: {name!r} is a {kind.name}, which no training graph has"
        )
    return kinds[kind]
