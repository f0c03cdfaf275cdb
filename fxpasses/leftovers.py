"""Gradients that local micro-batches left of parameters which the synchronising one does not use.

A step of several micro-batches may use a parameter in the first and not in the last (layers that are dropped at
random). So when a backward that synchronises is over, the ranks agree on what still waits, and reduce it by a
graph of the same passes that has these gradients as its inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from fxpasses import accumulation
from fxpasses.binding import Binding
from fxpasses.coverage import reduced
from fxpasses.distributed.agreement import agree, halves
from fxpasses.distributed.group import is_fake
from fxpasses.distributed.plans import Plan, PlanMismatch, Union
from fxpasses.distributed.waiting import waiting
from fxpasses.facts import form_of
from fxpasses.graph import PENDING_STATE, StateSpec
from fxpasses.passes.participation import STATE_KIND as PARTICIPATION
from fxpasses.state import STORE
from fxpasses.unit import Unit
from fxpasses.variants import LEFT, pending_of

_owing: set[tuple[int, ...]] = (
    set()
)  # regions with a local backward since their last synchronising one


def note_local(binding: Binding) -> None:
    """Say that a backward of this region did not synchronise."""
    _owing.add(binding.region)


def reduce_afterwards(
    unit: Unit, binding: Binding, afterwards: Callable[[Callable[[], None]], None]
) -> None:
    """Reduce what is left when the backward that is about to run, which synchronises, is over.

    Args:
        afterwards: calls a function then.
    """
    if binding.region in _owing:
        afterwards(lambda: _reduce(unit, binding))


def _reduce(unit: Unit, binding: Binding) -> None:
    if binding.region not in _owing:
        return  # the region ran twice in this backward
    _owing.discard(binding.region)
    union = _agreed(unit, binding)
    if not union.parameters:
        return
    if binding.plan.works_on_gradients:
        raise PlanMismatch(
            f"{union.parameters[0]} was left by an earlier micro-batch, but {binding.plan.code} works on all "
            f"gradients behind its backward ({binding.plan.works_on_gradients}): move that out of the compiled "
            "function, or use the same parameters in each micro-batch"
        )
    if binding.clipping is not None:
        raise PlanMismatch(
            f"option 'clip_norm': {union.parameters[0]} was left by an earlier micro-batch and is not in the "
            "norm by which the backward of the last one was clipped; use the same parameters in each "
            "micro-batch, or leave the option out and call torch.nn.utils.clip_grad_norm_"
        )
    parameters = {form.name: binding.agreed(form.name) for form in union.parameters}
    specs = tuple(pending_of(name, p) for name, p in parameters.items())
    backward = unit.backward(unit.starting(LEFT, union=union, absent=specs))
    taken = {name: accumulation.take(p) for name, p in parameters.items()}
    states = [_state(binding, spec, taken) for spec in backward.states]
    with waiting(unit.group, f"the reduction of what micro-batches of {unit.scope.code} left"):
        gradients = backward.module(*states)
    for spec, gradient in zip(specs, gradients, strict=True):
        parameter = parameters[spec.parameter]
        _deliver(parameter, gradient, taken[spec.parameter])
        if unit.group.size > 1:
            reduced(parameter, unit.group).contributions += 1
    if binding.runtime is not None:
        binding.runtime.record_collectives(backward.collectives)


def _agreed(unit: Unit, binding: Binding) -> Union:
    found = {name: binding.reachable(name) for name in binding.reach}
    left = {n: p for n, p in found.items() if p is not None and accumulation.is_pending(p)}
    forms = tuple(form_of(name, parameter) for name, parameter in left.items())
    code = f"what micro-batches of {unit.scope.code} left"
    plan = Plan(code, binding.plan.instance, unit.pipeline.spec, (), forms)
    plan = dataclasses.replace(plan, sets_gradients=binding.plan.sets_gradients)
    union = None
    if unit.group.size > 1 and not is_fake(unit.group):
        with waiting(unit.group, f"the agreement on {code}"):
            union = agree(
                unit.group,
                halves(plan.digest()),
                lambda: dataclasses.replace(plan, reachable=binding.whole_plan().reachable),
            )
    return Union(forms, ()) if union is None else union


def _deliver(parameter: torch.Tensor, gradient: torch.Tensor, taken: torch.Tensor | None) -> None:
    """In place: a whole step sets `.grad` to the tensor that it was, once it is over."""
    if taken is not None:
        parameter.grad = taken.copy_(gradient)
    elif parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = gradient


def _state(
    binding: Binding, spec: StateSpec, taken: Mapping[str, torch.Tensor | None]
) -> torch.Tensor:
    if spec.kind == PARTICIPATION:
        return torch.ones(spec.shape, dtype=spec.dtype, device=spec.device)
    if spec.kind != PENDING_STATE:
        return STORE.get_for(spec, binding.agreed)
    pending = taken[spec.parameter]
    if pending is None:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    return pending.contiguous()
