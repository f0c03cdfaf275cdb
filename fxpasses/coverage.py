"""No optimizer step on gradients that nobody reduced.

Dynamo runs eagerly what it can't capture (recurrent cells by default, code behind a graph break in an
unsupported call). Gradients made there never pass through a compiled region, so nothing reduces them. An
optimizer that holds some parameters which compiled regions reduce over ranks, and others with a gradient which
none of them does, is stopped before it steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_reduced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter → its name
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()


def note_reduced(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Some compiled backward reduces the gradients of these parameters over several ranks."""
    for name, parameter in named:
        _reduced[parameter] = name


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer mixes reduced and unreduced gradients.

    Raises:
        RuntimeError: naming the parameter by group, index and shape.
    """
    if not _reduced:
        return
    groups = [group["params"] for group in optimizer.param_groups]
    fine = _checked.setdefault(optimizer, set())
    new = [p for group in groups for p in group if p.grad is not None and id(p) not in fine]
    if not new:
        return
    if not any(p in _reduced for group in groups for p in group):
        return
    for parameter in new:
        if parameter not in _reduced:
            raise RuntimeError(
                f"the gradient of {_place(groups, parameter)} was not reduced over the ranks: no compiled "
                "region computes it. Dynamo runs the code that uses it eagerly; "
                "TORCH_LOGS=graph_breaks says why. Make that code compile, or give this parameter an "
                "optimizer of its own and reduce its gradient there"
            )
    fine.update(map(id, new))


def _place(groups: list[list[torch.Tensor]], parameter: torch.Tensor) -> str:
    for g, group in enumerate(groups):
        for i, candidate in enumerate(group):
            if candidate is parameter:
                return f"parameter {i} of group {g} ({parameter.dtype}{list(parameter.shape)})"
    raise AssertionError("the parameter is one of the optimizer's")
