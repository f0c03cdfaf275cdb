"""What we need of `torch._dynamo` internals. Checked on torch 2.11, 2.13 and 2.14."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import ShortenTraceback

from fxpasses.graph import Role


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


def refuse_unsupported(gm: fx.GraphModule, example_inputs: Sequence[Any], world: int) -> None:
    """Raise `ValueError` for programs whose gradients would not be reduced, or not rightly."""
    from torch.distributed.tensor import DTensor

    for node, example in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if isinstance(example, DTensor):
            raise ValueError(
                f"input {node.name!r} is a DTensor: sharded parameters (FSDP, tensor parallelism) are not "
                "supported; the hardened backend replicates the model on each rank"
            )
    autograd = (torch.autograd.grad, torch.autograd.backward)
    if world > 1 and any(node.target in autograd for node in gm.graph.nodes):
        raise ValueError(
            "the compiled function calls backward() or torch.autograd.grad() itself "
            "(torch._dynamo.config.trace_autograd_ops); its gradients would not be reduced: call backward() "
            "outside the compiled function"
        )


def input_roles(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Role]:
    """The role of each input of a Dynamo graph: parameters and buffers by qualified name."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    paths = [_source_path(node) for node in placeholders]
    kinds = [
        _kind(node, example) for node, example in zip(placeholders, example_inputs, strict=True)
    ]
    named = [path for path, kind in zip(paths, kinds, strict=True) if kind != "input"]
    # The root is a name in the user's frame (`self`, `model`); it says nothing where all share it.
    skip = 1 if len({path[:1] for path in named}) == 1 and all(len(p) > 1 for p in named) else 0
    roles: list[Role] = []
    taken: set[str] = set()
    for node, kind, path in zip(placeholders, kinds, paths, strict=True):
        name = node.name if kind == "input" else ".".join(path[skip:]) or node.name
        while name in taken:
            name += "'"
        taken.add(name)
        roles.append(Role(kind, name))
    return roles


def _kind(node: fx.Node, example: Any) -> str:
    if isinstance(example, torch.nn.Parameter):
        return "parameter"
    return "buffer" if "_buffers[" in _source_name(node) else "input"


def _source_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def _source_path(node: fx.Node) -> tuple[str, ...]:
    """`L['self']._modules['a']._parameters['weight']` → `("self", "a", "weight")`."""
    source = re.sub(r"\.__closure__\[\d+\]\.cell_contents|\.__self__", "", _source_name(node))
    groups = re.findall(r"\[['\"]([^'\"]+)['\"]\]|\[(\d+)\]|\.(\w+)", source)
    parts = [next(filter(None, group)) for group in groups]
    return tuple(p for p in parts if p not in ("_modules", "_parameters", "_buffers", "_orig_mod"))
