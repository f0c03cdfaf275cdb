"""One compiled region at run time: what happens around its forward and its backward.

    forward     on first use, rank 0's values; remembers, at the autograd node, whose parameters these are
    backward    state in ─▶ compiled backward ─▶ gradients, None where no loss took part

But for the first use, nothing here communicates: collectives are nodes of the compiled graph.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpasses import aot
from fxpasses.coverage import reduced
from fxpasses.distributed import first_use
from fxpasses.distributed.group import is_initialized, process_group
from fxpasses.graph import BUFFER_STATE, StateSpec
from fxpasses.passes.participation import STATE_KIND as PARTICIPATION
from fxpasses.runtimes import Runtime, owner_of, owns
from fxpasses.state import STORE
from fxpasses.unit import Unit

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class _Call:
    """A backward that is about to run: of which forward, and which of its outputs got a gradient."""

    calls: Calls
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    runtime: Runtime | None
    given: tuple[bool, ...]

    def given_tangents(self) -> frozenset[int]:
        positions = enumerate(self.calls.unit.returned)
        return frozenset(j for j, at in positions if at is None or self.given[at])


class Calls:
    """Wraps the two callables that a unit was compiled to."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        places = list(enumerate(unit.input_roles))
        self._parameters = [(i, role.name) for i, role in places if role.kind == "parameter"]
        self._buffers = [(i, role.name) for i, role in places if role.kind == "buffer"]
        self._group = _current_group(unit)
        self._records: list[Any] = []  # of the parameters that the backward reduces
        self._bound: tuple[list[weakref.ref[torch.Tensor]], Runtime | None] = ([], None)

    def forward(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what Dynamo calls."""

        def run(*args: Any) -> Any:
            if not (self.unit.trains and torch.is_grad_enabled()):
                return compiled(*args)
            owner = self._bind(args)
            started = aot.autograd_clock()
            outputs = compiled(*args)
            node = aot.autograd_node((*outputs, *args), self.unit.forward_metadata, started)
            if node is not None:
                parameters = {name: args[position] for position, name in self._parameters}
                buffers = {name: args[position] for position, name in self._buffers}
                node.register_prehook(
                    functools.partial(self._before_backward, parameters, buffers, owner)
                )
            return outputs

        return run

    def backward(self, compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Wrap a compiled backward that takes its arguments as one list."""

        def run(args: list[Any]) -> Any:
            call: _Call | None = getattr(_thread, "call", None)
            _thread.call = None
            assert call is not None and call.calls is self, "backward ran outside its autograd node"
            given = call.given_tangents()
            flags = torch.tensor([float(bool(s & given)) for s in self.unit.plan.sets])
            states = [_state(spec, call, flags) for spec in self.unit.plan.states]
            args.extend(states)
            outputs = compiled(args)
            if call.runtime is not None:
                call.runtime.record_backward(self.unit.plan.collectives)
            for record in self._records:
                record.contributions += 1
            return self._drop_unused(outputs, given, states)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _bind(self, args: Sequence[Any]) -> Runtime | None:
        """Find the runtime of the parameters of this call. On their first use they are made alike on all
        ranks.
        """
        references, owner = self._bound
        tensors = [args[position] for position, _ in self._parameters + self._buffers]
        same = len(references) == len(tensors) and (owner is None or owns(owner, tensors[0]))
        if same and all(r() is t for r, t in zip(references, tensors, strict=True)):
            return owner
        parameters = {name: args[position] for position, name in self._parameters}
        buffers = {name: args[position] for position, name in self._buffers}
        if self.unit.group.size > 1:
            first_use.make_alike(self.unit.group, parameters | buffers)
        if parameters:
            owner = owner_of(parameters)
            region = (self.unit.region, *map(id, parameters.values()))
            owner.record_plan(region, self.unit.plan.collectives)
        if self.unit.group.size > 1:
            names = {name for c in self.unit.plan.collectives for name in c.parameters}
            self._records = [reduced(p) for name, p in parameters.items() if name in names]
        self._bound = ([weakref.ref(t) for t in tensors], owner)
        return owner

    def _before_backward(
        self,
        parameters: dict[str, torch.nn.Parameter],
        buffers: dict[str, torch.Tensor],
        runtime: Runtime | None,
        grad_outputs: Sequence[Any],
    ) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the hardened backend does not support double backward (create_graph=True) through a "
                "compiled region; compute this gradient in eager mode"
            )
        if any(map(aot.is_batched, grad_outputs)):
            raise RuntimeError(
                "the hardened backend does not support batched gradients (is_grads_batched=True, vmap over a "
                "backward) through a compiled region; compute them one by one or in eager mode"
            )
        if _current_group(self.unit) is not self._group:
            raise RuntimeError(
                "torch.distributed was initialised, shut down or initialised anew after this model was "
                "compiled; call torch._dynamo.reset(), then compile again"
            )
        given = tuple(g is not None for g in grad_outputs)
        _thread.call = _Call(self, parameters, buffers, runtime, given)

    def _drop_unused(
        self, outputs: Sequence[Any], given: frozenset[int], states: list[torch.Tensor]
    ) -> Sequence[Any]:
        """None in place of a gradient whose tangents were given on no rank."""
        plan = self.unit.plan
        if len(given) == len(self.unit.returned):
            return outputs
        unused = {s for s in plan.needs if s and not s & given}
        if unused and self.unit.group.size > 1:
            unused &= self._unused_on_all_ranks(states)
        return [None if need in unused else x for x, need in zip(outputs, plan.needs, strict=True)]

    def _unused_on_all_ranks(self, states: list[torch.Tensor]) -> set[frozenset[int]]:
        """By what `Participation` agreed on; without it none, since a rank can't know of the others."""
        for spec, total in zip(self.unit.plan.states, states, strict=True):
            if spec.kind == PARTICIPATION:
                return {
                    s for s, t in zip(self.unit.plan.sets, total.tolist(), strict=True) if not t
                }
        return set()


def _current_group(unit: Unit) -> Any:
    """The process group that the unit's collectives would use now; None without one."""
    if not is_initialized():
        return None
    return process_group(unit.group.name) if unit.group.name is not None else "initialised"


def _state(spec: StateSpec, call: _Call, flags: torch.Tensor) -> torch.Tensor:
    if spec.kind == PARTICIPATION:
        return flags.to(spec.device)
    if spec.kind == BUFFER_STATE:
        return call.buffers[spec.parameter].detach()
    return STORE.get(call.parameters[spec.parameter], spec)
