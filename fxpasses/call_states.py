"""The tensors that a compiled forward or backward takes in as states, by what each is (`StateSpec.kind`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxpasses.binding import Binding
from fxpasses.graph import (
    ALARM,
    BUFFER_STATE,
    FAULT_NEWS,
    FAULT_TABLE,
    LIMIT_STATE,
    NORM_STATE,
    OVERFLOW_STATE,
    PENDING_STATE,
    REPLAYED,
    SCALE_STATE,
    WAITS_STATE,
    StateSpec,
)
from fxpasses.guards.alarms import Alarms
from fxpasses.passes.participation import STATE_KIND as PARTICIPATION
from fxpasses.state import STORE
from fxpasses.synchronise import Way
from fxpasses.unit import Backward

FAULTS = (FAULT_TABLE, FAULT_NEWS)  # armed anew in each run
TensorOf = Callable[[str], torch.Tensor]


@functools.cache
def _truth(value: bool, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


def state_of(
    kind: str, backward: Backward, states: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """The state of a kind of which there is one at most."""
    pairs = zip(backward.states, states, strict=True)
    return next((state for spec, state in pairs if spec.kind == kind), None)


def forward_state(
    spec: StateSpec, faults: dict[str, torch.Tensor], alarms: Alarms | None
) -> torch.Tensor:
    """What a forward, which has faults and alarms alone, takes in."""
    if spec.name in faults:
        return faults[spec.name]
    assert alarms is not None, "the forward is guarded"
    return alarms.tensor(spec)


def backward_state(
    spec: StateSpec, binding: Binding, tensor_of: TensorOf, way: Way, flags: Mapping[Any, bool]
) -> torch.Tensor:
    """What a backward takes in, and writes to.

    Args:
        binding: of the call.
        tensor_of: a parameter or buffer, by name.
        way: how the ranks agreed to communicate.
        flags: whether each gradient takes part here, in the order of the graph.
    """
    if spec.kind == PARTICIPATION:
        return torch.tensor([float(flag) for flag in flags.values()], device=spec.device)
    if spec.kind == BUFFER_STATE:
        return tensor_of(spec.parameter).detach()
    if spec.kind == WAITS_STATE:
        return _truth(spec.parameter in way.pending, spec.device)
    if spec.kind == PENDING_STATE:
        pending = way.pending.get(spec.parameter)
        if pending is None:
            return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        return pending.contiguous()
    if spec.kind == NORM_STATE:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    if spec.kind == LIMIT_STATE:
        assert binding.clipping is not None, "the graph clips"
        return binding.clipping.limit_tensor(spec.device)
    if spec.kind in (ALARM, REPLAYED):
        assert binding.alarms is not None, "the graph is guarded"
        return binding.alarms.tensor(spec)
    if spec.kind in (SCALE_STATE, OVERFLOW_STATE):
        scaler = binding.scaler
        assert scaler is not None, "the graph has a loss scale"
        return (scaler.scale_tensor if spec.kind == SCALE_STATE else scaler.overflow_tensor)(
            spec.device
        )
    return STORE.get_for(spec, tensor_of)
