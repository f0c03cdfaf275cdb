"""How a backward that is about to run communicates: not at all, as planned, or as the ranks agree anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from fxpasses import accumulation, leftovers
from fxpasses.binding import Binding
from fxpasses.clipping import Clipping
from fxpasses.compression import Levels
from fxpasses.distributed.agreement import agree
from fxpasses.distributed.group import is_fake
from fxpasses.distributed.plans import Union
from fxpasses.distributed.waiting import waiting
from fxpasses.graph import BUFFER_STATE, StateSpec
from fxpasses.unit import Unit
from fxpasses.variants import LOCAL, SYNCHRONISE, TOTAL, Variant, pending_of


@dataclasses.dataclass(frozen=True)
class Way:
    """How one backward runs.

    Attributes:
        variant: of the compiled backward.
        pending: by parameter, what was accumulated in `.grad` and has been taken out of it.
    """

    variant: Variant
    pending: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def choose(
    unit: Unit,
    binding: Binding,
    parameters: Mapping[str, torch.Tensor],
    backward: int,
    afterwards: Callable[[Callable[[], None]], None],
) -> Way:
    """Decide; over several ranks, together with all of them.

    Args:
        parameters: of this call, by name.
        backward: identity of the call of `backward()`.
        afterwards: calls a function when that call is over.

    Raises:
        PlanMismatch: on all ranks, where they can't agree.
    """
    if not unit.synchronises:
        return Way(Variant())
    owner = binding.runtime
    if owner is not None and not owner.synchronises(backward, unit.hardening.accumulate):
        leftovers.note_local(binding)
        return Way(Variant(LOCAL))
    leftovers.reduce_afterwards(unit, binding, afterwards)
    levels, union = _levels(unit, binding), None
    if unit.group.size > 1 and owner is not None and not is_fake(unit.group):
        with waiting(unit.group, f"the agreement before the backward of {unit.scope.code}"):
            union = agree(unit.group, binding.digest(levels), lambda: binding.whole_plan(levels))
    own = {name: parameters[name] for name in unit.facts.gradients}
    absent = {} if union is None else _absent(unit, binding, union)
    others = {name: binding.agreed(name) for name in absent}
    if unit.levels:
        unit.levels.count(own | others)
    if binding.clipping is not None:
        _begin_clipping(unit, binding.clipping, [*own.values(), *others.values()], backward)
    # A whole step adds to what `.grad` holds; a backward returns the total.
    pending = _taken(own, accumulation.claim if unit.is_whole_step else accumulation.take)
    mode = TOTAL if pending else SYNCHRONISE
    if union is None:
        return Way(Variant(mode, levels=levels), pending)
    pending |= _taken(others, accumulation.take)
    variant = Variant(mode, union, tuple(absent.values()), _buffers(binding, union), levels)
    return Way(variant, pending)


def _levels(unit: Unit, binding: Binding) -> Levels | None:
    if not unit.levels:
        return None
    known = unit.levels.statistics(binding.reachable)
    levels = unit.levels.choose(known, binding.reachable)
    if binding.runtime is not None:
        branches = unit.levels.branches(levels, known)
        binding.runtime.record_branches(binding.region, branches)
    return levels


def _begin_clipping(
    unit: Unit, clipping: Clipping, parameters: Sequence[torch.Tensor], backward: int
) -> None:
    """The norm is that of all that `.grad` will hold, so what it holds already (zeros, often) is part of it."""
    clipping.begin(parameters, backward, unit.scope.code)
    for parameter in parameters:
        if parameter.grad is not None:
            accumulation.begin(parameter, unit.hardening.reduce, unit.group.size)


def _taken(
    parameters: Mapping[str, torch.Tensor], take: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    taken = {name: take(p) for name, p in parameters.items()}
    return {name: gradient for name, gradient in taken.items() if gradient is not None}


def _absent(unit: Unit, binding: Binding, union: Union) -> dict[str, StateSpec]:
    """What this rank has no gradient of, although others do."""
    names = [form.name for form in union.parameters if form.name not in unit.facts.gradients]
    return {name: pending_of(name, binding.agreed(name)) for name in names}


def _buffers(binding: Binding, union: Union) -> tuple[StateSpec, ...]:
    found = [(form.name, binding.agreed(form.name)) for form in union.buffers]
    return tuple(
        StateSpec(BUFFER_STATE, name, tuple(t.shape), t.dtype, t.device) for name, t in found
    )
