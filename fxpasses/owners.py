"""Which runtime a model, its parameters and an optimizer have; and what ends a step.

runtime(model)       found by any parameter, so it works before the first forward as well
optimizer.step()     checked first, and the end of a step for each runtime whose parameters it holds
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpasses.coverage import check_optimizer
from fxpasses.faults.spec import UPDATE
from fxpasses.runtimes import OWNER, Runtime

DECIDES_ON_DEVICE = (
    "_fxpasses_decides_on_device"  # an optimizer that takes `end_step_on_device` itself
)


def runtime(x: Any) -> Runtime:
    """The runtime of a model.

    Args:
        x: the compiled module, the plain module under it, or a compiled function (its parameters are
            those of the modules that it is bound to or closes over). A part of a model has the runtime
            of the whole.

    Raises:
        ValueError: when no parameter can be found through `x`.
    """
    watch_optimizers()
    named = {name.replace("_orig_mod.", ""): p for name, p in _parameters_of(x)}
    if not named:
        raise ValueError(
            f"runtime({x!r}): no parameter is reachable from it; pass the module that holds them"
        )
    return owner_of(named, named_by=len(named) if isinstance(x, torch.nn.Module) else 0)


def owner_of(named: Mapping[str, torch.Tensor], named_by: float = 0) -> Runtime:
    """The one runtime of these parameters; several that own some of them become one.

    Args:
        named_by: see `Runtime.adopt`.
    """
    owners = {id(o): o for p in named.values() if (o := OWNER.get(p)) is not None}
    first, *rest = owners.values() or [Runtime()]
    for other in rest:
        first.absorb(other)
    first.adopt(named, named_by)
    return first


def owns(runtime: Runtime, parameter: torch.Tensor) -> bool:
    """Whether a parameter belongs to this runtime now."""
    return OWNER.get(parameter) is runtime


def runtimes_of(optimizer: torch.optim.Optimizer) -> list[Runtime]:
    """The runtimes that own some of an optimizer's parameters."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return list({id(o): o for p in parameters if (o := OWNER.get(p)) is not None}.values())


def _parameters_of(x: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, held in held_by(x):
        if isinstance(held, torch.nn.Parameter):
            yield name, held
        else:
            prefix = f"{name}." if name else ""
            yield from ((prefix + k, p) for k, p in held.named_parameters())


def held_by(x: Any) -> Iterator[tuple[str, torch.nn.Module | torch.nn.Parameter]]:
    """The modules and parameters that `x` is, or that a function is bound to or closes over, with their names
    there.
    """
    if isinstance(x, torch.nn.Module):
        yield "", x
        return
    if isinstance(x, functools.partial):
        for part in (x.func, *x.args, *x.keywords.values()):
            yield from held_by(part)
        return
    bound = getattr(x, "__self__", None)
    if bound is not None:
        yield from held_by(bound)
        return
    if isinstance(original := getattr(x, "_torchdynamo_orig_callable", None), functools.partial):
        yield from held_by(original)
        return
    function = inspect.unwrap(original or x) if callable(x) else x
    if not inspect.isfunction(function):
        if function is not x:
            yield from held_by(function)
        return
    reached = inspect.getclosurevars(function)
    for name, value in {**reached.globals, **reached.nonlocals}.items():
        if isinstance(value, torch.nn.Module | torch.nn.Parameter):
            yield name, value


@torch.compiler.disable
def _before_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    check_optimizer(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    for owner in runtimes_of(optimizer):
        if owner.scaler is not None and closure is not None:
            raise RuntimeError(
                "option 'loss_scale': an optimizer with a closure computes gradients inside its step, when "
                "overflow has been decided already; use loss_scale='none' with it"
            )
        owner.check_clipping(optimizer)
        owner.check_replicas(optimizer)
        decides = getattr(optimizer, DECIDES_ON_DEVICE, False)
        if owner.faults is not None and owner.faults.has(UPDATE) and not decides:
            raise ValueError(
                "option 'faults': where=update strikes inside of an update; give the optimizer to "
                "fxpasses.optimizer"
            )
        if not decides and owner.end_step():
            for parameter in parameters:
                if OWNER.get(parameter) is owner:
                    parameter.grad = None


@functools.cache
def watch_optimizers() -> None:
    """From now on every `optimizer.step()` ends a step, and is stopped if gradients were not reduced."""
    register_optimizer_step_pre_hook(_before_optimizer_step)
