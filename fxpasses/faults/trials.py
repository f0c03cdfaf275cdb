"""One fault after another in one compiled program, each compared with a run without.

    golden run ─▶ outputs, gradients          armed by hand ─▶ the same run ─▶ outcome

Each run starts from the same parameters, buffers and random numbers. All of a campaign is one compilation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from fxpasses.faults.arming import Event, Faults
from fxpasses.faults.models import FORMS, drawn
from fxpasses.faults.sites import Site
from fxpasses.faults.spec import parse_faults
from fxpasses.guards.alarms import FaultDetected

MASKED, DETECTED, CORRECTED, SILENT, CRASH, HANG = OUTCOMES = (
    "masked",
    "detected",
    "corrected",
    "silent",
    "crash",
    "hang",
)


@dataclasses.dataclass(frozen=True)
class Shot:
    """A fault at one place.

    Attributes:
        site, fault: where, and which of the option's faults.
        index: of the element.
        bits: that flip, for a `bitflip`; else empty.
    """

    site: Site
    fault: int
    index: int
    bits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a shot did.

    Attributes:
        outcome: one of `OUTCOMES`.
        event: what was hit.
        error: relative change of outputs and gradients, the larger of the two norms' ratios.
        said: of the alarm or the exception.
    """

    outcome: str
    event: Event | None
    error: float
    said: str = ""


@dataclasses.dataclass
class _Golden:
    """What a run without a fault gives, in fp64, and its squared norm."""

    values: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.size = sum(float(x.square().sum()) for x in self.values)

    def apart(self, now: Sequence[torch.Tensor]) -> float:
        """Of all tensors together: the norm of what changed by the norm; infinity for what is not finite."""
        pairs = zip(now, self.values, strict=True)
        changed = sum(float((b - a).square_().sum()) for a, b in pairs)
        if changed != changed or changed == float("inf"):
            return float("inf")
        return (changed / self.size) ** 0.5 if self.size else float(changed > 0)


class Trials:
    """A program with faults and guards, compiled once.

    Attributes:
        sites: where faults may happen, in an order that does not change from run to run.

    Args:
        function: a module or function. Gradients and buffers are those of the modules that it is, is bound to,
            closes over or is called with.
        args, kwargs: what it is called with.
        loss: makes a number of what it returns; None: the mean of squares of all floating outputs.
        options: of the backend; `faults` with steps `none`.
        backend: its name.
        tolerance: a relative change up to this counts as masked.
        seed: of random numbers in each run.

    Raises:
        ValueError: for a program that does not do the same twice, and for faults that select nothing in it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        options: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        backend: str = "hardened_aot_eager",
        tolerance: float = 1e-4,
        seed: int = 0,
    ) -> None:
        from fxpasses.owners import held_by, runtime

        self._args, self._kwargs = tuple(args), dict(kwargs or {})
        self._seed, self._tolerance = seed, tolerance
        self._loss = loss or _mean_square
        called = (function, *self._args, *self._kwargs.values())
        held = [m for x in called for _, m in held_by(x) if isinstance(m, nn.Module)]
        modules = nn.ModuleList(held)
        self._buffers = list(modules.buffers())
        self._trained = [p for p in modules.parameters() if p.requires_grad]
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._compiled = torch.compile(function, backend=backend, options=dict(options))
        golden = self._run()
        self._golden = tuple(
            _Golden([x.to(torch.float64, copy=True) for x in part]) for part in golden
        )
        self._runtime = runtime(held[0] if held else function)
        again = self._run()
        self.sites = self._selected()
        if self._error(again):
            raise ValueError(
                "the program does not compute the same twice; a campaign can't compare"
            )

    @property
    def faults(self) -> Faults:
        assert self._runtime.faults is not None, "option 'faults' is set"
        return self._runtime.faults

    def _selected(self) -> tuple[Site, ...]:
        """The sites. A phase that the program does not have is no mistake, if there is another one."""
        if self._runtime.faults is None:
            raise ValueError(
                "nothing of the program was compiled; a campaign has no place for a fault"
            )
        for fault, message in self.faults.unmatched().items():
            if fault.pattern != "*" or not self.faults.sites:
                raise ValueError(message)
        return tuple(sorted(self.faults.sites, key=lambda site: (site.phase, site.name)))

    def shot(self, seed: int, trial: int) -> Shot:
        """The fault of a trial: drawn, the same for the same numbers."""
        draw = drawn(seed, "trial", trial)
        site = self.sites[drawn(draw, "site") % len(self.sites)]
        number = site.faults[drawn(draw, "fault") % len(site.faults)]
        fault = self.faults.faults[number]
        numel = site.numel or 1
        index = fault.index if fault.index is not None else drawn(draw, "index") % numel
        bits = fault.bit
        if fault.model == "bitflip" and not bits:
            left = list(range(FORMS[site.dtype].width))
            bits = tuple(left.pop(drawn(draw, "bit", i) % len(left)) for i in range(fault.bits))
        return Shot(site, number, index, tuple(sorted(bits)))

    def run(self, shot: Shot) -> Result:
        """Carry it out.

        Raises:
            RuntimeError: when the fault did not happen.
        """
        faults, alarms = self.faults, self._runtime.alarms
        faults.clear()
        if alarms is not None:
            alarms.take()  # of a run that crashed
            alarms.events.clear()
        faults.strike(shot.site, fault=shot.fault, index=shot.index, bit=shot.bits or None)
        found, said = None, ""
        try:
            found = self._run()
        except FaultDetected as error:
            said = str(error)
        except Exception as error:
            return Result(CRASH, _last(faults), float("nan"), f"{type(error).__name__}: {error}")
        finally:
            faults.disarm()
        event = _last(faults)
        if event is None:
            raise RuntimeError(f"the planned fault at {shot.site} did not happen")
        change = float("nan") if found is None else self._error(found)
        alarm = None if alarms is None else alarms.take()
        if said or alarm is not None:
            return Result(DETECTED, event, change, said or str(alarm.place if alarm else ""))
        if alarms is not None and alarms.events:
            outcome = CORRECTED if change == 0 else SILENT
            return Result(outcome, event, change, alarms.events[-1].place)
        return Result(MASKED if change <= self._tolerance else SILENT, event, change)

    def _run(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs and gradients."""
        torch.manual_seed(self._seed)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(value)
        for parameter in self._trained:
            parameter.grad = None
        outputs = self._compiled(*self._args, **self._kwargs)
        floating = _floating(outputs)
        if any(x.requires_grad for x in floating):
            self._loss(outputs).backward()
        gradients = [p.grad for p in self._trained if p.grad is not None]
        return [x.detach() for x in floating], gradients

    def _error(self, found: tuple[list[torch.Tensor], list[torch.Tensor]]) -> float:
        return max(g.apart(now) for now, g in zip(found, self._golden, strict=True))


def options_of(model: str, phases: Sequence[str], guards: str) -> dict[str, str]:
    """Options for a campaign.

    Args:
        model: such as `"bitflip"` or `"bitflip{bits=2}"`.
        phases: such as `"forward"` or `"gradient:0.*"`.
    """
    name, _, rest = model.rstrip("}").partition("{")
    own = f",{rest}" if rest else ""
    faults = ";".join(f"{name}{{where={phase},step=none{own}}}" for phase in phases)
    parse_faults(faults)
    return {"faults": faults, **({"guards": guards} if guards else {})}


def _mean_square(outputs: Any) -> torch.Tensor:
    return torch.stack([x.float().square().mean() for x in _floating(outputs)]).sum()


def _floating(outputs: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _last(faults: Faults) -> Event | None:
    events = faults.events
    return events[-1] if events else None
