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
from fxpasses.coverage import Reduced, reduced
from fxpasses.distributed import first_use
from fxpasses.distributed.group import is_initialized, process_group
from fxpasses.graph import BUFFER_STATE, StateSpec
from fxpasses.passes.participation import STATE_KIND as PARTICIPATION
from fxpasses.runtimes import Runtime, owner_of, owns
from fxpasses.state import STORE
from fxpasses.unit import Unit

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class _Binding:
    """What a unit needs to know of the tensors that one module brings; one unit may serve several.

    Attributes:
        references: to the parameters and buffers, in the order of the unit's inputs.
        runtime: of the parameters; None without any.
        records: of the parameters whose gradients the backward reduces over several ranks.
    """

    references: list[weakref.ref[torch.Tensor]]
    runtime: Runtime | None
    records: list[Reduced]

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        if self.runtime is not None and not owns(self.runtime, tensors[0]):
            return False
        return all(r() is t for r, t in zip(self.references, tensors, strict=True))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A backward that is about to run: of which forward, and which of its outputs got a gradient."""

    calls: Calls
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    binding: _Binding
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
        self._bindings: dict[tuple[int, ...], _Binding] = {}  # by ids of the tensors

    def forward(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what Dynamo calls."""

        def run(*args: Any) -> Any:
            if not (self.unit.trains and torch.is_grad_enabled()):
                return compiled(*args)
            parameters = {name: args[position] for position, name in self._parameters}
            buffers = {name: args[position] for position, name in self._buffers}
            binding = self._bind(parameters, buffers)
            started = aot.autograd_clock()
            outputs = compiled(*args)
            node = aot.autograd_node((*outputs, *args), self.unit.forward_metadata, started)
            if node is not None:
                node.register_prehook(
                    functools.partial(self._before_backward, parameters, buffers, binding)
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
            if call.binding.runtime is not None:
                call.binding.runtime.record_backward(self.unit.plan.collectives)
            for record in call.binding.records:
                record.contributions += 1
            return self._drop_unused(outputs, given, states)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _bind(
        self, parameters: dict[str, torch.nn.Parameter], buffers: dict[str, torch.Tensor]
    ) -> _Binding:
        """What is known of the tensors of this call. On their first use they are made alike on all ranks."""
        tensors = [*parameters.values(), *buffers.values()]
        key = tuple(map(id, tensors))
        known = self._bindings.get(key)
        if known is not None and known.is_of(tensors):
            return known
        several = self.unit.group.size > 1
        if several:
            first_use.make_alike(self.unit.group, parameters | buffers)
        plan = self.unit.plan.collectives
        owner = owner_of(parameters) if parameters else None
        if owner is not None:
            owner.record_plan((self.unit.region, *map(id, parameters.values())), plan)
        names = {name for collective in plan for name in collective.parameters if several}
        records = [reduced(p) for name, p in parameters.items() if name in names]
        self._bindings[key] = _Binding([weakref.ref(t) for t in tensors], owner, records)
        return self._bindings[key]

    def _before_backward(
        self,
        parameters: dict[str, torch.nn.Parameter],
        buffers: dict[str, torch.Tensor],
        binding: _Binding,
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
        _thread.call = _Call(self, parameters, buffers, binding, given)

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
