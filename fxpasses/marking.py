"""Say in Dynamo's graph where `backward()` adds to `.grad`, so that the ATen graph still tells.

With `torch._dynamo.config.trace_autograd_ops` a call of `backward()` becomes plain tensor code. Each addition
is made one call of a marker, an operator that no graph keeps (`whole_step.py` replaces it):

    grad = autograd.grad(loss, [p])                    grad = autograd.grad(loss, [p])
    new = empty_like(p); new.copy_(grad[0])            new = empty_like(p)
                                                       new.copy_(accumulate(grad[0], None, "p"))
      where `.grad` exists, also
    old.add_(new)                                      old.copy_(accumulate(grad[0], old, "p"))

Whatever reads `.grad` behind that reads the marker's result. The marked graph is a copy: Dynamo goes on using
its own. Forms that Dynamo writes: checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.dynamo import copied_graph
from fxpasses.graph import Role

_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward)


@torch.library.custom_op(
    "fxpasses::accumulate",
    mutates_args=(),
    schema="(Tensor gradient, Tensor? before, str parameter) -> Tensor",
)
def _accumulate(
    gradient: torch.Tensor, before: torch.Tensor | None, parameter: str
) -> torch.Tensor:
    return gradient.clone() if before is None else before + gradient


@_accumulate.register_fake
def _(gradient: torch.Tensor, before: torch.Tensor | None, parameter: str) -> torch.Tensor:
    return torch.empty_like(gradient if before is None else before)


MARKER = torch.ops.fxpasses.accumulate.default


def calls_backward(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph, or a graph inside it, computes gradients itself."""
    return any(node.target in _AUTOGRAD for m in _graphs(gm) for node in m.graph.nodes)


def is_marked(gm: fx.GraphModule) -> bool:
    """Whether a graph has markers."""
    return any(gm.graph.find_nodes(op="call_function", target=MARKER))


def mark(gm: fx.GraphModule, roles: Sequence[Role], held: Mapping[str, str]) -> fx.GraphModule:
    """A copy of a Dynamo graph in which each addition to a parameter's `.grad` is a marker.

    Args:
        roles: of its inputs, in order.
        held: by the name of each placeholder that is a parameter with a `.grad`, the placeholder that is that.

    Raises:
        ValueError: for gradients of parameters that go elsewhere.
    """
    marked = copied_graph(gm)
    marking = _Marking(marked.graph, roles, held)
    for module in _graphs(marked):
        for node in module.graph.nodes:
            if node.target is torch.autograd.backward or (
                module is not marked and node.target in _AUTOGRAD
            ):
                raise ValueError(_refusal("gradients"))
    for node in marked.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        marking.mark_gradients_of(node)
    marked.recompile()
    return marked


class _Marking:
    """Rewrites the additions of one graph."""

    def __init__(self, graph: fx.Graph, roles: Sequence[Role], held: Mapping[str, str]) -> None:
        inputs = list(zip(graph.find_nodes(op="placeholder"), roles, strict=True))
        self._graph = graph
        self._names = {node: role.name for node, role in inputs if role.kind == "parameter"}
        nodes = {node.name: node for node, _ in inputs}
        # For each parameter the tensors that have been its `.grad` so far.
        self._holders = {
            node: [nodes[held[node.name]]] for node in self._names if node.name in held
        }

    def mark_gradients_of(self, grad: fx.Node) -> None:
        """Mark what one call of `autograd.grad` adds to parameters."""
        inputs = grad.kwargs.get("inputs", grad.args[1] if len(grad.args) > 1 else ())
        of: list[Any] = [inputs] if isinstance(inputs, fx.Node) else list(inputs)  # type: ignore
        names = [self._names[node] for node in of if node in self._names]
        if not names:
            return
        if grad.kwargs.get("create_graph") or (len(grad.args) > 4 and grad.args[4]):
            raise ValueError(
                "the compiled function calls backward(create_graph=True) or differentiates a gradient of "
                f"{names[0]!r} again; over several ranks that is not supported inside a compiled function"
            )
        for item in list(grad.users):
            if item.target is not operator.getitem:
                raise ValueError(_refusal(f"the gradient of {names[0]!r}"))
            parameter = of[item.args[1]]  # type: ignore[index]
            if parameter in self._names:
                self._mark(parameter, item)

    def _mark(self, parameter: fx.Node, gradient: fx.Node) -> None:
        """Mark each addition of one gradient to its parameter's `.grad`."""
        name = self._names[parameter]
        for filled in list(gradient.users):
            if not _fills(filled, parameter, gradient):
                raise ValueError(_refusal(f"the gradient of {name!r}"))
            new = filled.args[0]
            added = filled.next
            holder = self._holder_of(parameter, filled, added)
            with self._graph.inserting_before(added if holder is not None else filled):
                marker = self._graph.call_function(MARKER, (gradient, holder, name))
            marker.meta = copy.copy(gradient.meta)
            if holder is None:
                filled.args = (new, marker)
                self._holders.setdefault(parameter, []).append(new)
            else:
                added.target, added.args = "copy_", (holder, marker)
                self._graph.erase_node(filled)
                self._graph.erase_node(new)  # type: ignore[arg-type]

    def _holder_of(self, parameter: fx.Node, filled: fx.Node, added: fx.Node) -> fx.Node | None:
        """The tensor that `added` adds the new gradient to, if it is backward() that adds it.

        The program's own code may add `.grad` to anything, but not on the line that calls backward().
        """
        new = filled.args[0]
        if added.op != "call_method" or added.target != "add_" or len(added.args) != 2:
            return None
        holder, value = added.args
        same_line = added.meta.get("stack_trace") == filled.meta.get("stack_trace")
        known = value is new and same_line and holder in self._holders.get(parameter, ())
        return holder if known else None  # type: ignore[return-value]


def _fills(node: fx.Node, parameter: fx.Node, gradient: fx.Node) -> bool:
    """Whether this is `empty_like(parameter).copy_(gradient)`, as backward() begins an addition."""
    if node.op != "call_method" or node.target != "copy_" or len(node.args) != 2:
        return False
    new, value = node.args
    return (
        value is gradient
        and isinstance(new, fx.Node)
        and new.target is torch.empty_like
        and new.args == (parameter,)
    )


def _refusal(what: str) -> str:
    return (
        f"the compiled function calls torch.autograd.grad() or torch.autograd.backward() for {what}; over "
        "several ranks only gradients that a tensor's backward() adds to .grad are reduced: call "
        "loss.backward() there, or take the gradient outside the compiled function"
    )


def _graphs(gm: fx.GraphModule) -> Iterable[fx.GraphModule]:
    return (module for module in gm.modules() if isinstance(module, fx.GraphModule))
