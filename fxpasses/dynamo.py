"""What we need of `torch._dynamo` internals. Checked on torch 2.11, 2.13 and 2.14."""

from __future__ import annotations

import contextlib
import copy
import dis
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo import external_utils
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.constant import CONSTANT_VARIABLE_NONE
from torch._guards import Source

from fxpasses.graph import Role
from fxpasses.scope import Scope, scope_of


class VisibleValueError(ShortenTraceback, ValueError):
    """A `ValueError` that Dynamo hands to the user as it is, not wrapped in `BackendCompilerFailed`."""


@contextlib.contextmanager
def user_errors_visible() -> Iterator[None]:
    """Let a `ValueError` raised inside reach the user of `torch.compile` as a `ValueError`."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, VisibleValueError):
            raise
        raise VisibleValueError(str(error), first_useful_frame=None) from error


@contextlib.contextmanager
def backend_errors_bare() -> Iterator[None]:
    """Let what a backend raises inside come out as it was raised."""
    try:
        yield
    except BackendCompilerFailed as failed:
        raise failed.inner_exception from failed


def own_settings() -> None:
    """Set what the backend can't do without, once, when it is loaded.

    `fail_on_recompile_limit_hit`: past the limit Dynamo would run the model eagerly, gradients unreduced.
    `skip_nnmodule_hook_guards` off: a module hook registered after the first call applies.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def region_being_compiled() -> int:
    """Identity of the code that Dynamo is compiling, the same in each recompilation."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    assert compile_id is not None and compile_id.frame_id is not None, "Dynamo is compiling nothing"
    return compile_id.frame_id


def refuse_unsupported(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise `ValueError` for programs whose gradients would not be reduced, or not rightly."""
    from torch.distributed.tensor import DTensor

    for node, example in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if isinstance(example, DTensor):
            raise ValueError(
                f"input {node.name!r} is a DTensor: sharded parameters (FSDP, tensor parallelism) are not "
                "supported; the hardened backend replicates the model on each rank"
            )


def describe_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[Scope, list[Role]]:
    """What the code that Dynamo is compiling can reach, and the role of each input of its graph.

    Called by a backend, while Dynamo compiles.
    """
    frame = InstructionTranslator.current_tx().output.root_tx
    code = frame.f_code
    variables = {k: v for k, v in frame.f_locals.items() if not k.startswith("___")}
    variables |= {k: frame.f_globals[k] for k in _global_names(code) if k in frame.f_globals}
    reader = _reader()
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        variables |= reader.module_behind(node)
    label = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    if code.co_filename == external_utils.__file__:  # Dynamo's own, around a module of torch's
        label = "forward"
    scope = scope_of(label, variables)
    named = {node: scope.names.get(id(reader.value(node))) for node in placeholders}
    return scope, input_roles(gm, example_inputs, {n: name for n, name in named.items() if name})


def mark_precision(gm: fx.GraphModule) -> None:
    """Say on Dynamo's nodes where the program itself decides on precision; their ATen nodes inherit it
    (`meta["custom"]`), in the backward too. Neither leaves an operator behind where all is fp32.

    `"keep"`: under `autocast(enabled=False)`. `"explicit"`: reads the result of a `.float()`.
    """
    regions: dict[fx.Node, bool] = {}  # entered and not left: whether autocast is off there
    for node in gm.graph.nodes:
        if _is_explicit_fp32(node):
            for user in node.users:
                _mark(user, "explicit")
        if node.target is torch.amp.autocast_mode._enter_autocast:
            regions[node] = not node.args[2]
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            regions.pop(node.args[0], None)
        elif regions and list(regions.values())[-1]:
            _mark(node, "keep")


def _mark(node: fx.Node, precision: str) -> None:
    custom = node.meta.get("custom") or {}
    node.meta["custom"] = {**custom, "precision": precision}


def _is_explicit_fp32(node: fx.Node) -> bool:
    if node.op != "call_method":
        return False
    given = (*node.args[1:], *node.kwargs.values())
    return node.target == "float" or (node.target in ("to", "type") and torch.float32 in given)


def copied_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph of Dynamo's, which goes on using its own."""
    graph = copy.deepcopy(gm.graph)
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):  # AOTAutograd asks for it
            new._dynamo_source = old._dynamo_source
    copied = fx.GraphModule(gm, graph, type(gm).__name__)
    copied.meta = gm.meta
    return copied


def _global_names(code: types.CodeType) -> list[str]:
    """The globals that some code reads, in order. (`co_names` holds attributes too.)"""
    instructions = dis.get_instructions(code)
    return list(dict.fromkeys(i.argval for i in instructions if i.opname in _LOADS))


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


def forget_none() -> None:
    """Dynamo 2.13 and 2.14 have one object for None, and write to it where None came from when `.grad` is read.
    What is compiled next would look for it there (pytorch/torch/_dynamo/variables/tensor.py, `var_getattr`).
    """
    CONSTANT_VARIABLE_NONE.source = None


def gradients_held(gm: fx.GraphModule) -> dict[str, str]:
    """By the name of each placeholder that is a parameter, the placeholder that is its `.grad`.

    Called by a backend, while Dynamo compiles.
    """
    reader = _reader()
    values = {node.name: reader.value(node) for node in gm.graph.find_nodes(op="placeholder")}
    names = {id(value): name for name, value in values.items() if isinstance(value, torch.Tensor)}
    parameters = {n: v for n, v in values.items() if isinstance(v, torch.nn.Parameter)}
    return {n: names[id(p.grad)] for n, p in parameters.items() if id(p.grad) in names}


def gradients_set(scope: Scope) -> list[str]:
    """The parameters whose `.grad` the code that Dynamo is compiling sets itself when its graph has run."""
    reader = _reader()
    effects = InstructionTranslator.current_tx().output.side_effects
    stores = effects.store_attr_mutations.items()
    owners = [reader.read(variable.source) for variable, values in stores if "grad" in values]
    return [scope.names[id(owner)] for owner in owners if id(owner) in scope.names]


def _reader() -> _SourceReader:
    frame = InstructionTranslator.current_tx().output.root_tx
    return _SourceReader({"L": frame.f_locals, "G": frame.f_globals})


class _SourceReader:
    """What stands behind the inputs of a Dynamo graph while it is compiled."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._variables = dict(variables)
        self._values: dict[Source, Any] = {}

    def value(self, node: fx.Node) -> Any:
        return self.read(getattr(node, "_dynamo_source", None))

    def module_behind(self, node: fx.Node) -> dict[str, torch.nn.Module]:
        """The outermost module on the way to an input (`trainer.model` of `trainer.model.head.weight`), by
        its path; empty where there is none.
        """
        source = getattr(node, "_dynamo_source", None)
        found: dict[str, torch.nn.Module] = {}
        while source is not None:
            value = self.read(source)
            if isinstance(value, torch.nn.Module):
                found = {".".join(_path(source)): value}
            source = getattr(source, "base", None)
        return found

    def read(self, source: Source | None) -> Any:
        """None for what the code itself makes."""
        try:
            return source and source.get_value(self._variables, {}, self._values)
        except (NotImplementedError, NameError, LookupError, AttributeError, TypeError):
            return None


def input_roles(
    gm: fx.GraphModule, example_inputs: Sequence[Any], known: Mapping[fx.Node, str] | None = None
) -> list[Role]:
    """The role of each input of a Dynamo graph.

    Args:
        known: names of parameters and buffers; others are named after the variables that hold them.
    """
    known = known or {}
    roles: list[Role] = []
    taken: set[str] = set()
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        kind = _kind(node, example)
        path = ".".join(_path(getattr(node, "_dynamo_source", None)))
        name = known.get(node) or (path if kind != "input" else "") or node.name
        while name in taken:
            name += "'"
        taken.add(name)
        roles.append(Role(kind, name))
    return roles


def _kind(node: fx.Node, example: Any) -> str:
    if isinstance(example, torch.nn.Parameter):
        return "parameter"
    source = getattr(node, "_dynamo_source", None)
    return "buffer" if "_buffers[" in _text(source) else "input"


def _text(source: Any) -> str:
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def _path(source: Any) -> tuple[str, ...]:
    return path_in(_text(source))


def module_of(node: fx.Node) -> str:
    """Qualified name of the module whose code a node belongs to; empty for the outermost, or if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = path_in(list(stack.values())[-1][0]) if stack else ()
    return ".".join(path[1:])


def path_in(text: str) -> tuple[str, ...]:
    """`L['self']._modules['a']._parameters['weight']` → `("self", "a", "weight")`."""
    text = re.sub(r"\.__closure__\[\d+\]\.cell_contents|\.__self__", "", text)
    groups = re.findall(r"\[['\"]([^'\"]+)['\"]\]|\[(\d+)\]|\.(\w+)", text)
    parts = [next(filter(None, group)) for group in groups]
    return tuple(p for p in parts if p not in ("_modules", "_parameters", "_buffers", "_orig_mod"))
