"""A whole step at run time: forward, backward and gradients are one call.

    call    on first use, rank 0's values ─▶ how to communicate ─▶ state in ─▶ that variant

It counts as one micro-batch, however many backwards it holds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpasses import accumulation
from fxpasses.calls import Call, Calls, Compiled, emptied
from fxpasses.synchronise import Way
from fxpasses.unit import Backward, Unit
from fxpasses.variants import LOCAL

_thread = threading.local()
_numbers = itertools.count(-2, -1)  # calls of `backward()` have numbers from 0, and -1 is none


class StepCalls(Calls):
    """Wraps the callable that a whole step was compiled to."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        self._called: Callable[..., Any] | None = None

    def forward(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what Dynamo calls."""
        if self.unit.whole_step is None:  # nothing was traced
            return compiled
        self._called = compiled

        def run(*args: Any) -> Any:
            self.refuse_other_group()
            parameters, buffers = self.tensors(args)
            call = Call(self, parameters, buffers, self.bind(parameters, buffers), ())
            if call.binding.faults is not None:
                call.binding.faults.before_forward(parameters)
            _thread.afterwards = []
            outputs = self.synchronised(call, next(_numbers), args)
            for function in _thread.afterwards:
                function()
            if self.unit.updates_parameters and call.binding.faults is not None:
                call.binding.faults.end_step()  # no optimizer will say so
            return outputs

        return run

    def afterwards(self, function: Callable[[], None]) -> None:
        _thread.afterwards.append(function)

    def step(
        self, compiled: Compiled, compile_variant: Callable[[Backward], Compiled]
    ) -> Callable[[list[Any]], Any]:
        """Wrap the compiled graph, inside of what Dynamo calls.

        Args:
            compiled: the primary variant; it takes its arguments as one list.
            compile_variant: compiles another one.
        """
        self.add_compiled(compiled, compile_variant)

        def run(args: list[Any]) -> Any:
            way, states, absent = _thread.step
            _thread.step = None
            outputs = self.compiled(way.variant)([*emptied(args), *states])
            assert self.unit.whole_step is not None
            own = self.unit.whole_step.outputs
            absent += outputs[own:]
            return outputs[:own]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def execute(
        self, call: Call, way: Way, args: Sequence[Any], states: list[torch.Tensor]
    ) -> list[Any]:
        if way.variant.mode == LOCAL:
            self._begin_accumulation(call)
        absent: list[torch.Tensor] = []
        _thread.step = (way, states, absent)
        assert self._called is not None
        return [*self._called(*args), *absent]

    def _begin_accumulation(self, call: Call) -> None:
        """In front of the graph, which adds to what `.grad` holds. Where it makes a new `.grad`, an old one is
        nothing to it.
        """
        assert self.unit.whole_step is not None
        for name in call.binding.reach:
            parameter, own = call.binding.reachable(name), name in self.unit.facts.gradients
            if parameter is None or not (own or parameter.grad is not None):
                continue
            adds = not own or name in self.unit.whole_step.before
            reduce = self.unit.hardening.reduce if adds else "mean"
            accumulation.begin(parameter, reduce, self.unit.group.size)

    def local_gradients(self, call: Call, outputs: Sequence[Any]) -> None:
        """They have begun already."""

    def flags(self, way: Way, given: frozenset[int]) -> dict[Any, bool]:
        own = self.unit.facts.gradients
        return {name: name in own or name in way.pending for name in way.variant.layout or ()}

    def drop_unused(
        self, way: Way, outputs: Sequence[Any], given: frozenset[int], took_part: dict[Any, bool]
    ) -> list[Any]:
        own = len(outputs) - len(way.variant.absent)
        absent = zip(way.variant.absent, outputs[own:], strict=True)
        return [*outputs[:own], *(x if took_part[spec.parameter] else None for spec, x in absent)]
