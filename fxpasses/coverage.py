"""No optimizer step on gradients that nobody reduced.

Dynamo runs eagerly what it can't capture (recurrent cells by default, modules with backward hooks, code
behind a graph break in an unsupported call). Gradients made there never pass through a compiled region, so
nothing reduces them. An optimizer that holds parameters which compiled regions reduce over ranks is stopped
before it steps on a gradient, of any of its parameters, that no region has contributed to since its last step.

A parameter can be used both in a compiled region and outside (a tied head applied in the loss): its gradient
then is reduced only in part. And an optimizer may hold nothing but parameters that a compiled module has and no
region reduces, which is right if the program does it itself. So the ranks compare an optimizer's gradients at
its first step, and again at steps 2, 4, 8, … 1024, 2048, 3072, …
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpasses.accumulation import is_pending
from fxpasses.distributed.alike import differing
from fxpasses.distributed.group import Group, is_fake, several_ranks


@dataclasses.dataclass
class Reduced:
    """What is known of a parameter: over which ranks compiled regions reduce its gradient, and how many have
    contributed to it so far.
    """

    group: Group
    contributions: int = 0


_reduced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter → Reduced
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_COMPARE_EVERY = 1024  # steps; before that at each power of two
# For each optimizer what its parameters' gradients were when it last stepped: the gradient, its version, and
# the contributions to it.
_Seen = tuple[weakref.ref[torch.Tensor], int, int]
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, _Seen]]
_seen = weakref.WeakKeyDictionary()


_NOTHING_REDUCED = (
    "the hardened backend was asked for, but no compiled region has reduced a gradient of this optimizer's. If "
    "its model was compiled with that backend, Dynamo ran all of it eagerly and its gradients differ over the "
    "ranks; TORCH_LOGS=graph_breaks says why. (Inside DistributedDataParallel they don't differ, but no option "
    "of the backend applies: compile the module itself.)"
)
_NOT_REDUCED = (
    "was not reduced over the ranks: no compiled region computed it. Dynamo runs the code that uses it "
    "eagerly; TORCH_LOGS=graph_breaks says why. Make that code compile, or give this parameter an optimizer of "
    "its own and reduce its gradient before it steps"
)


def reduced(parameter: torch.Tensor, group: Group) -> Reduced:
    """The record of a parameter whose gradients some compiled backward reduces over several ranks."""
    return _reduced.setdefault(parameter, Reduced(group))


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer is about to step on a gradient that was not reduced.

    Raises:
        RuntimeError: naming the parameter by group, index, dtype and shape.
    """
    _check_nothing_pending(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    records = [_reduced.get(p) for p in parameters]
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if not any(records):
        if step == 1 and several_ranks() and any(p.grad is not None for p in parameters):
            warnings.warn(_NOTHING_REDUCED, stacklevel=2)
        return
    if step % _COMPARE_EVERY == 0 or (step < _COMPARE_EVERY and step & (step - 1) == 0):
        _check_alike(optimizer, parameters, records)
    if not any(record.contributions for record in records if record):
        return  # the program reduces them, as the comparison has shown
    seen = _seen.setdefault(optimizer, {})
    for index, (parameter, record) in enumerate(zip(parameters, records, strict=True)):
        gradient = parameter.grad
        if gradient is None or gradient.numel() == 0:
            continue
        contributions = record.contributions if record else 0
        if not _explained(gradient, contributions, seen.get(index)):
            raise RuntimeError(f"the gradient of {place_of(optimizer, parameter)} {_NOT_REDUCED}")
        seen[index] = (weakref.ref(gradient), gradient._version, contributions)


def _check_alike(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    records: list[Reduced | None],
) -> None:
    for group in dict.fromkeys(record.group for record in records if record is not None):
        own = [record is not None and record.group == group for record in records]
        gradients = [p.grad if mine else None for p, mine in zip(parameters, own, strict=True)]
        what = "the comparison of an optimizer's gradients"
        index = None if is_fake(group) else differing(group, gradients, what)
        if index is not None:
            record = records[index]
            if record is not None and not record.contributions:
                raise RuntimeError(
                    f"the gradient of {place_of(optimizer, parameters[index])} {_NOT_REDUCED}"
                )
            raise RuntimeError(
                f"the gradient of {place_of(optimizer, parameters[index])} differs over the ranks: a compiled "
                "region reduced its part of it, and something else added to it, on each rank its own. Dynamo "
                "may run other code that uses this parameter eagerly (TORCH_LOGS=graph_breaks), or the "
                "program uses it outside of what is compiled; compile that as well"
            )


def _check_nothing_pending(optimizer: torch.optim.Optimizer) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if is_pending(parameter) and parameter.grad.any():
            raise RuntimeError(
                f"the gradient of {place_of(optimizer, parameter)} was accumulated on this rank alone (option "
                "'accumulate', or no_sync) and no backward has reduced it since; run the last micro-batch of a "
                "step under fxpasses.runtime(model).sync(), on all ranks, with all parameters that its "
                "micro-batches used"
            )


def _explained(gradient: torch.Tensor, contributions: int, before: _Seen | None) -> bool:
    """By a contribution since the last step, by nothing having happened since, or by being zeroed."""
    if before is None:
        return contributions > 0 or not gradient.any()
    old, version, counted = before
    untouched = old() is gradient and gradient._version == version
    return contributions > counted or untouched or not gradient.any()


def place_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> str:
    """Where an optimizer holds a parameter, in words."""
    groups: Iterable[list[torch.Tensor]] = (group["params"] for group in optimizer.param_groups)
    for g, group in enumerate(groups):
        for i, candidate in enumerate(group):
            if candidate is parameter:
                return f"parameter {i} of group {g} ({parameter.dtype}{list(parameter.shape)})"
    raise AssertionError("the parameter is one of the optimizer's")
