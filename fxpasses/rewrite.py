"""`splice`: passes write tensor code, and it becomes nodes.

The function is traced with the fake values of its arguments, in the graph's own fake mode, and the traced
nodes are inlined before a given node. Each new node says where it comes from (`meta["provenance"]`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.graph import TrainingGraph, eliminate_dead_code, without_code

# The rule by which a node stands for one (`Provenance.source`) that a loop has computed.
LOOPED = "loop"
_OWN = str(Path(__file__).parent / "trace.py")  # calls what it traces


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Why a node exists: the pass and the rule in it, the source node, its model line, the parameters."""

    pass_name: str
    rule: str
    source: str = ""
    model_line: str = ""
    parameters: tuple[str, ...] = ()


def model_line(node: fx.Node) -> str:
    """`file:line` of the user's code that a node comes from; empty where tracing kept none."""
    trace = node.meta.get("stack_trace") or ""
    lines = map(str.strip, trace.splitlines())
    frames = [line for line in lines if line.startswith("File ") and _OWN not in line]
    if not frames:
        return ""
    path, line = frames[-1].split(", ")[:2]
    return f"{path.removeprefix('File ').strip(chr(34))}:{line.removeprefix('line ')}"


def origin_of(node: fx.Node) -> Provenance:
    """What a pass noted of a node that it wrote; empty for one of the program."""
    return node.meta.get("provenance", Provenance("", ""))


class Listener(Protocol):
    """Who is asked about rewrites before they happen."""

    def before_splice(self, provenance: Provenance) -> None:
        """A `splice` begins."""

    def wants(self, provenance: Provenance) -> bool:
        """Whether a rewrite shall happen that a pass can as well leave out."""


_listeners: list[Listener] = []


def wanted(provenance: Provenance) -> bool:
    """Whether a rewrite shall happen: yes, unless `fxpasses bisect` asks for the first few only.

    A pass whose splices make sense only several at once asks so for each thing that it does, before it does the
    first one, so that it can be stopped between any two.
    """
    return all(listener.wants(provenance) for listener in _listeners)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Ask this listener meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def splice(
    graph: TrainingGraph,
    before: fx.Node,
    fn: Callable[..., Any],
    *args: Any,
    name: str,
    provenance: Provenance,
) -> Any:
    """Inline `fn(*args)` before a node.

    Args:
        graph: the graph to write to.
        before: the new nodes stand right before this one, in the order in which `fn` computes them.
        fn: plain tensor code. Python numbers are constants; every tensor must come in as an argument.
        args: pytrees whose leaves may be nodes of the graph.
        name: prefix of the new nodes' names.
        provenance: recorded on each new node.

    Returns:
        What `fn` returned, nodes in place of tensors.

    Raises:
        ValueError: when `fn` uses a tensor that is not an argument.
    """
    for listener in _listeners:
        listener.before_splice(provenance)
    leaves, structure = pytree.tree_flatten(args)
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def call(*values: torch.Tensor) -> Any:
        remaining = iter(values)
        filled = [next(remaining) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        return fn(*pytree.tree_unflatten(filled, structure))

    mode = graph.fake_mode
    # Only the nodes are wanted: no code, no notes of the functions that were called.
    with _tolerant(mode), mode, torch.no_grad(), without_code():
        # Tracing tells arguments apart by identity, and two nodes may share one value.
        values = [n.meta["val"] for n in nodes]
        values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
        traced = make_fx(
            call,
            decomposition_table=graph.decompositions,
            _disable_torch_fn_metadata_mode=True,
        )(*values)
    eliminate_dead_code(traced.graph)  # parts of a split, say, that `fn` has no use for
    return _inline(graph, before, traced, nodes, name, provenance)


@contextlib.contextmanager
def _tolerant(mode: FakeTensorMode) -> Iterator[None]:
    """Let a real tensor through, as a constant of the trace: `_copy` then says what is wrong with it."""
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def _inline(
    graph: TrainingGraph,
    before: fx.Node,
    traced: fx.GraphModule,
    arguments: list[fx.Node],
    name: str,
    provenance: Provenance,
) -> Any:
    env: dict[fx.Node, fx.Node] = {}
    remaining = iter(arguments)
    with graph.graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            else:
                env[node] = _copy(graph, traced, node, env, name)
                env[node].meta.update(
                    {k: node.meta[k] for k in ("val", "tensor_meta") if k in node.meta},
                    provenance=provenance,
                )
    raise AssertionError("a traced graph ends with an output node")


def _copy(
    graph: TrainingGraph,
    traced: fx.GraphModule,
    node: fx.Node,
    env: dict[fx.Node, fx.Node],
    name: str,
) -> fx.Node:
    if node.op == "get_attr":
        value = getattr(traced, str(node.target))
        if not isinstance(value, fx.GraphModule):
            raise ValueError(
                f"splice({name!r}): the function uses a tensor that is not an argument; pass tensors as "
                "arguments and constants as Python numbers"
            )
        attribute = f"{name}_{node.target}"
        while hasattr(graph.module, attribute):
            attribute += "_"
        graph.module.add_module(attribute, value)
        return graph.graph.get_attr(attribute)
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    assert isinstance(args, tuple) and isinstance(kwargs, dict)
    short = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return graph.graph.create_node(node.op, node.target, args, kwargs, name=f"{name}_{short}")
