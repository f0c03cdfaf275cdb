"""Run a forward or backward again that a guard had an alarm about, from a snapshot of what it works on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from fxpasses.guards.alarms import Alarms, FaultDetected

Result = TypeVar("Result")


def recomputes(alarms: Alarms | None) -> bool:
    return alarms is not None and alarms.guards.repeats_calls


def guarded(
    alarms: Alarms | None,
    run: Callable[[], Result],
    written: Iterable[torch.Tensor],
    devices: Iterable[torch.device] = (),
) -> Result:
    """Run a region; where its guards alarm and that is what is to be done, once more.

    Over several ranks a graph that communicates has its alarms agreed on, so that all of them run again, or
    none.

    Args:
        run: leaves its inputs as they are, but for `written` and the state of torch's random numbers.
        devices: that it draws these on, besides the CPU.

    Raises:
        FaultDetected: if there is an alarm again.
    """
    if alarms is None or not recomputes(alarms):
        return run()
    tensors = list(written)
    kept = [tensor.clone() for tensor in tensors]
    draw_again = _random_numbers(devices)
    result = run()
    found = alarms.take()
    if found is None:
        return result
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)
    draw_again()
    result = run()
    alarms.note(found)
    again = alarms.take()
    if again is not None:
        raise FaultDetected(
            f"option 'guards': step {again.step}: {again.place} does not agree with its checksum or limit, and "
            "did not when it was recomputed; the fault is not transient"
        )
    return result


def _random_numbers(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Remember where torch's generators are; what is returned puts them back there."""
    cpu = torch.get_rng_state()
    modules = [(torch.get_device_module(d), d) for d in {*devices} if d.type != "cpu"]
    states = [(module, device, module.get_rng_state(device)) for module, device in modules]

    def put_back() -> None:
        torch.set_rng_state(cpu)
        for module, device, state in states:
            module.set_rng_state(state, device)

    return put_back
