"""Whole steps as graphs, for tests."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from fxpasses import aot, marking
from fxpasses.dynamo import describe_inputs, forget_none, gradients_held
from fxpasses.graph import TrainingGraph, copied
from fxpasses.marking import MARKER
from fxpasses.tail import join
from fxpasses.whole_step import WholeStep, split
from tests.graphs import checked, nodes_with

_count = itertools.count()
X = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 2.0]])


def marked(step: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Dynamo's graph of a function that calls backward(), as it was, and with markers."""
    found: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        forget_none()
        _, roles = describe_inputs(gm, example_inputs)
        found.append((gm, marking.mark(gm, roles, gradients_held(gm))))
        return gm.forward

    _compile(step, backend, args)
    return found[-1]


@dataclasses.dataclass(frozen=True)
class Traced:
    """The ATen graph of a function that calls backward(), with markers and roles, and its real inputs."""

    module: fx.GraphModule
    inputs: list[torch.Tensor]


def traced_step(step: Callable[..., Any], *args: Any) -> Traced:
    """Trace a function, without running it."""
    found: list[Traced] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        forget_none()
        _, roles = describe_inputs(gm, example_inputs)
        gm = marking.mark(gm, roles, gradients_held(gm))

        def keep(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            aot.annotate_whole_step(module, roles)

            def run(*inputs: torch.Tensor) -> list[None]:
                found.append(Traced(module, list(inputs)))
                return [None] * len(module.graph.output_node().args[0])  # type: ignore[arg-type]

            return make_boxed_func(run)

        return aot_autograd(
            fw_compiler=keep, inference_compiler=keep, keep_inference_input_mutations=True
        )(gm, example_inputs)

    _compile(step, backend, args)
    return found[-1]


def _compile(step: Callable[..., Any], backend: Callable[..., Any], args: Sequence[Any]) -> None:
    # A code of its own: what Dynamo remembers, it remembers by the name of the code.
    name = f"{step.__name__}_{next(_count)}"
    code = step.__code__.replace(co_name=name)
    fresh = types.FunctionType(code, step.__globals__, name, None, step.__closure__)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(fresh, backend=backend, fullgraph=True)(*args)


def one(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().sum()
    loss.backward()
    return loss.detach()


def two(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    model(x * 2).sum().backward()


def clipped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    one(model, x)
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def reads_in_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(x).square().sum().backward()
    norm = model[0].weight.grad.norm()
    model(x * 2).sum().backward()
    return norm


def twin_of(model: nn.Module) -> nn.Module:
    """A copy, `.grad` included."""
    twin = copy.deepcopy(model)
    for new, old in zip(twin.parameters(), model.parameters(), strict=True):
        new.grad = None if old.grad is None else old.grad.clone()
    return twin


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def cut(step: Callable[..., Any], model: nn.Module) -> WholeStep:
    return split(traced_step(step, twin_of(model), X).module)


def joined(step: WholeStep, *passes: Any) -> TrainingGraph:
    graph = TrainingGraph(copied(step.head))
    checked(graph, *passes)
    join(step, graph)
    return graph


def head(step: WholeStep) -> TrainingGraph:
    return TrainingGraph(step.head)


def results(step: Callable[..., Any], model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The outputs of a step that was cut and joined, and the gradients that it left where some were before."""
    model = twin_of(model)
    before = [p.grad for p in model.parameters()]
    traced = traced_step(step, model, X)
    graph = joined(split(traced.module))
    assert not nodes_with(graph, MARKER)
    graph.graph.lint()
    return list(fx.Interpreter(graph.module).run(*traced.inputs)), before


def expected(step: Callable[..., Any], model: nn.Module) -> tuple[Any, list[Any]]:
    """What the function returns, and the gradients that it leaves."""
    twin = twin_of(model)
    return step(twin, X), [p.grad for p in twin.parameters()]


def close(found: list[Any], wanted: list[Any]) -> bool:
    return all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


def ancestors(node: fx.Node) -> set[str]:
    found, pending = set(), [node]
    while pending:
        current = pending.pop()
        found.add(current.name)
        pending += [n for n in current.all_input_nodes if n.name not in found]
    return found
