"""One compiled region at run time: what happens around its forward and its backward.

    forward     on first use, rank 0's values; remembers, at the autograd node, whose parameters these are
    backward    how to communicate ─▶ state in ─▶ that variant ─▶ gradients, None where no loss took part

Apart from first use and agreement nothing communicates here: collectives are nodes of the compiled graph.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from fxpasses import accumulation, aot
from fxpasses.binding import Binding, Watched, bind, watch
from fxpasses.call_states import FAULTS, backward_state, forward_state, state_of
from fxpasses.coverage import reduced
from fxpasses.distributed.group import is_initialized, process_group
from fxpasses.distributed.waiting import waiting
from fxpasses.graph import FAULT_TABLE, NORM_STATE
from fxpasses.guards.replay import guarded, recomputes
from fxpasses.passes.participation import STATE_KIND as PARTICIPATION
from fxpasses.synchronise import Way, choose
from fxpasses.unit import Backward, Unit
from fxpasses.variants import LOCAL, Variant

Compiled = Callable[[list[Any]], Any]
Known = TypeVar("Known", bound=Watched)
_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class Call:
    """A backward that is about to run: of which forward, and which of its outputs got a gradient."""

    calls: Calls
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    binding: Binding
    given: tuple[bool, ...]

    def given_tangents(self) -> frozenset[int]:
        positions = enumerate(self.calls.unit.returned)
        return frozenset(j for j, at in positions if at is None or self.given[at])

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter or buffer: an input of the graph, or one that takes part on other ranks only."""
        known = self.parameters.get(name, self.buffers.get(name))
        tensor = self.binding.reachable(name) if known is None else known
        assert tensor is not None, name
        return tensor


class Calls:
    """Wraps the two callables that a unit was compiled to."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        places = list(enumerate(unit.input_roles))
        self._parameters = [(i, role.name) for i, role in places if role.kind == "parameter"]
        self._buffers = [(i, role.name) for i, role in places if role.kind == "buffer"]
        self._group = _current_group(unit)
        self._bindings: dict[tuple[int, ...], Binding] = {}  # by ids of the tensors
        self._watched: dict[tuple[int, ...], Watched] = {}  # likewise
        self._compiled: dict[Variant, Compiled] = {}
        self._compile: Callable[[Backward], Compiled] | None = None

    def forward(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what Dynamo calls."""

        def run(*args: Any) -> Any:
            if not (self.unit.trains and torch.is_grad_enabled()):
                return self._inference(compiled, args)
            parameters, buffers = self.tensors(args)
            binding = self.bind(parameters, buffers)
            if binding.faults is not None:
                binding.faults.before_forward(parameters)
            started = aot.autograd_clock()
            outputs = self._with_states(compiled, args, binding, buffers)
            if binding.runtime is None and binding.alarms is not None:
                binding.alarms.check_now()
            node = aot.autograd_node((*outputs, *args), self.unit.forward_metadata, started)
            if node is not None:
                node.register_prehook(
                    functools.partial(self._before_backward, parameters, buffers, binding)
                )
            return outputs

        return run

    def _inference(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Without a backward nothing communicates, and nobody's values are taken."""
        if not self.unit.forward_states:
            return compiled(*args)
        parameters, buffers = self.tensors(args)
        watched = self._watch(parameters, buffers)
        outputs = self._with_states(compiled, args, watched, buffers)
        if watched.alarms is not None:
            watched.alarms.check_now()  # no step will ask
        return outputs

    def _with_states(
        self,
        compiled: Callable[..., Any],
        args: Sequence[Any],
        watched: Watched,
        buffers: dict[str, torch.Tensor],
    ) -> Any:
        """Call a forward with its states, and write to these what it returns of them."""
        specs = self.unit.forward_states
        if not specs:
            return compiled(*args)
        faults, alarms = watched.faults, watched.alarms
        if alarms is not None:
            alarms.learn(self.unit.alarm_places, self.unit.modules)

        def run() -> Any:
            found: dict[str, torch.Tensor] = {}
            if faults is not None:
                found = faults.states((watched.region, "forward"), specs, self.unit.places)
            states = [forward_state(spec, found, alarms) for spec in specs]
            outputs = compiled(*args, *states)
            own = len(outputs) - len(states)
            for spec, state, new in zip(specs, states, outputs[own:], strict=True):
                if spec.kind != FAULT_TABLE:
                    state.copy_(new)
            return outputs[:own]

        return guarded(alarms, run, buffers.values(), (spec.device for spec in specs))

    def backward(
        self, compiled: Compiled, compile_variant: Callable[[Backward], Compiled]
    ) -> Callable[[list[Any]], Any]:
        """Wrap a compiled backward.

        Args:
            compiled: the primary variant; it takes its arguments as one list.
            compile_variant: compiles another one.
        """
        self.add_compiled(compiled, compile_variant)

        def run(args: list[Any]) -> Any:
            call: Call | None = getattr(_thread, "call", None)
            _thread.call = None
            assert call is not None and call.calls is self, "backward ran outside its autograd node"
            return self.synchronised(call, aot.backward_id(), args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def add_compiled(
        self, compiled: Compiled, compile_variant: Callable[[Backward], Compiled]
    ) -> None:
        """See `backward`."""
        self._compiled[self.unit.primary] = compiled
        self._compile = compile_variant

    def compiled(self, variant: Variant) -> Compiled:
        """A variant, compiled when it is first asked for."""
        if variant not in self._compiled:
            assert self._compile is not None
            self._compiled[variant] = self._compile(self.unit.backward(variant))
        return self._compiled[variant]

    def synchronised(self, call: Call, number: int, args: Any) -> Sequence[Any]:
        """Run it the way that the ranks agree on; what was taken to be reduced is put back if that fails.

        Args:
            number: identity of the call of `backward()`.
        """
        way = choose(self.unit, call.binding, call.parameters, number, self.afterwards)
        try:
            return self._run(call, way, args)
        except BaseException:
            for name, gradient in way.pending.items():
                accumulation.put_back(call.tensor(name), gradient)
            raise

    def execute(
        self, call: Call, way: Way, args: list[Any], states: list[torch.Tensor]
    ) -> Sequence[Any]:
        """Run the compiled variant."""
        return self.compiled(way.variant)([*emptied(args), *states])

    def afterwards(self, function: Callable[[], None]) -> None:
        """Call this when the backward that is running is over."""
        aot.after_backward(function)

    def _run(self, call: Call, way: Way, args: Any) -> Sequence[Any]:
        backward = self.unit.backward(way.variant)
        self.compiled(way.variant)
        given = call.given_tangents()
        flags = self.flags(way, given)
        alarms, kept = call.binding.alarms, list(args) if recomputes(call.binding.alarms) else args
        if alarms is not None:
            alarms.learn(backward.alarm_places, backward.modules)
        states = [
            backward_state(spec, call.binding, call.tensor, way, flags)
            if spec.kind not in FAULTS
            else None
            for spec in backward.states
        ]

        def run() -> Sequence[Any]:
            """A fault that struck is not armed a second time."""
            faults: dict[str, torch.Tensor] = {}
            if call.binding.faults is not None:
                region = (call.binding.region, "backward")
                faults = call.binding.faults.states(region, backward.states, backward.places)
            filled = [
                faults[spec.name] if state is None else state
                for spec, state in zip(backward.states, states, strict=True)
            ]
            again = list(kept) if recomputes(alarms) else args
            return self.execute(call, way, again, filled)

        with waiting(self.unit.group, f"the backward of {self.unit.scope.code}"):
            written = [s for s in states if s is not None]
            outputs = guarded(alarms, run, written, (spec.device for spec in backward.states))
        if call.binding.faults is not None and not self.unit.updates_parameters:
            call.binding.faults.after_backward(call.parameters)
        took_part = self._took_part(backward, states, flags)
        outputs = self.drop_unused(way, outputs, given, took_part)
        if call.binding.runtime is not None:
            if way.variant.union is not None or way.variant.levels is not None:
                call.binding.runtime.record_plan(call.binding.region, backward.collectives)
            norm = state_of(NORM_STATE, backward, states)
            call.binding.runtime.record_backward(backward.collectives, norm)
        if way.variant.mode == LOCAL:
            self.local_gradients(call, outputs)
            return outputs
        for record in call.binding.records.values():
            record.contributions += 1
        own = len(outputs) - len(way.variant.absent)
        for spec, gradient in zip(way.variant.absent, outputs[own:], strict=True):
            if gradient is not None:
                parameter = call.tensor(spec.parameter)
                reduced(parameter, self.unit.group).contributions += 1
                _deliver(parameter, gradient)
        return outputs[:own]

    def flags(self, way: Way, given: frozenset[int]) -> dict[Any, bool]:
        """By output, or by parameter where the ranks' graphs differ: whether that gradient takes part here."""
        facts = self.unit.facts
        waiting_here = {facts.gradients[name] for name in way.pending if name in facts.gradients}
        by_output = {
            index: bool(need & given) or index in waiting_here
            for index, need in facts.flagged.items()
        }
        if way.variant.layout is None:
            return by_output
        return {
            name: by_output.get(facts.gradients[name], True)
            if name in facts.gradients
            else name in way.pending
            for name in way.variant.layout
        }

    def _took_part(
        self, backward: Backward, states: Sequence[torch.Tensor | None], flags: dict[Any, bool]
    ) -> dict[Any, bool]:
        """The same over all ranks: by what `Participation` agreed on; without it everything may have, since a
        rank can't know of the others.
        """
        total = state_of(PARTICIPATION, backward, states)
        if total is not None:
            return dict(zip(flags, map(bool, total.tolist()), strict=True))
        several = self.unit.group.size > 1 and bool(backward.collectives)
        return dict.fromkeys(flags, True) if several else flags

    def drop_unused(
        self, way: Way, outputs: Sequence[Any], given: frozenset[int], took_part: dict[Any, bool]
    ) -> list[Any]:
        """None in place of a gradient that takes part on no rank."""
        facts = self.unit.facts
        layout = way.variant.layout
        if layout is None:
            return [x if took_part.get(index, True) else None for index, x in enumerate(outputs)]
        used = [
            index not in facts.flagged or bool(facts.flagged[index] & given)
            for index in range(len(outputs) - len(way.variant.absent))
        ]
        for name, index in facts.gradients.items():
            used[index] = took_part[name]
        used += [took_part[spec.parameter] for spec in way.variant.absent]
        return [x if use else None for x, use in zip(outputs, used, strict=True)]

    def local_gradients(self, call: Call, outputs: Sequence[Any]) -> None:
        """Of all that the code can reach, `.grad` becomes this rank's share, not only of what gets a gradient
        here: which that is may differ over the ranks, and a share counts only if all ranks have theirs.
        """
        gradients = self.unit.facts.gradients
        for name in call.binding.reach:
            parameter = call.binding.reachable(name)
            if parameter is None:
                continue  # gone since
            gets_one = name in gradients and outputs[gradients[name]] is not None
            if gets_one or parameter.grad is not None:
                accumulation.begin(parameter, self.unit.hardening.reduce, self.unit.group.size)

    def tensors(
        self, args: Sequence[Any]
    ) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.Tensor]]:
        """Parameters and buffers of a call, by name."""
        parameters = {name: args[position] for position, name in self._parameters}
        return parameters, {name: args[position] for position, name in self._buffers}

    def bind(
        self, parameters: dict[str, torch.nn.Parameter], buffers: dict[str, torch.Tensor]
    ) -> Binding:
        return self._known(self._bindings, bind, parameters, buffers)

    def _watch(
        self, parameters: dict[str, torch.nn.Parameter], buffers: dict[str, torch.Tensor]
    ) -> Watched:
        if not parameters:  # it belongs to no model: what was armed in a call before is over
            return watch(self.unit, parameters, buffers)
        return self._known(self._watched, watch, parameters, buffers)

    def _known(
        self,
        before: dict[tuple[int, ...], Known],
        make: Callable[[Unit, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Known],
        parameters: dict[str, torch.nn.Parameter],
        buffers: dict[str, torch.Tensor],
    ) -> Known:
        """What is known of these tensors since a call before, or is found out now."""
        tensors = [*parameters.values(), *buffers.values()]
        key = tuple(map(id, tensors))
        known = before.get(key)
        if known is None or not known.is_of(tensors):
            known = before[key] = make(self.unit, parameters, buffers)
        return known

    def refuse_other_group(self) -> None:
        """Raise if the process group is not the one that was compiled for."""
        if _current_group(self.unit) is not self._group:
            raise RuntimeError(
                "torch.distributed was initialised, shut down or initialised anew after this model was "
                "compiled; call torch._dynamo.reset(), then compile again"
            )

    def _before_backward(
        self,
        parameters: dict[str, torch.nn.Parameter],
        buffers: dict[str, torch.Tensor],
        binding: Binding,
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
        self.refuse_other_group()
        given = tuple(g is not None for g in grad_outputs)
        _thread.call = Call(self, parameters, buffers, binding, given)


def _current_group(unit: Unit) -> Any:
    """The process group that the unit's collectives would use now; None without one."""
    if not is_initialized():
        return None
    return process_group(unit.group.name) if unit.group.name is not None else "initialised"


def emptied(args: list[Any]) -> list[Any]:
    """The arguments of a boxed call, which frees them as it goes: nobody else may hold them."""
    taken = list(args)
    args.clear()
    return taken


def _deliver(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to one that the graph of this rank does not know, as autograd would: hooks run."""
    torch.autograd.backward([parameter], [gradient])
