"""The loss scale of a model across steps: its settings, its value, and what a step does to it.

After Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, with GradScaler's rule for growth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fxpasses.config import LossScale


class LossScaleError(RuntimeError):
    """The loss scale would fall below its minimum: gradients don't stop overflowing."""


class Scaler:
    """A loss scale.

    Everything is a float32 tensor without dimensions, which compiled backwards read and write: no recompilation
    when it changes, and no wait for the device until the host asks.

    Args:
        settings: how it changes; None for a constant scale.
        scale: the value to start from.
    """

    def __init__(self, settings: LossScale | None, scale: float) -> None:
        self.settings = settings
        self._tracker = torch.zeros(())  # finite steps since the last change
        self._streak = torch.zeros(())  # non-finite steps in a row since the last change
        self._fails = torch.zeros(())  # 1 once the scale would have fallen below its minimum
        self._news = torch.zeros(())  # a copy of it for the host, on its way until `_told`
        self._told: torch.Event | None = None
        self._overflow: torch.Tensor | None = None  # what was decided for the step under way
        self._initial = scale
        self._scales: dict[torch.device, torch.Tensor] = {}  # by device, the first one's first
        self._overflows: dict[torch.device, torch.Tensor] = {}

    @property
    def scale(self) -> float:
        """The value now; waits for the device."""
        return float(next(iter(self._scales.values()), self._initial))

    @property
    def growth_tracker(self) -> int:
        return int(self._tracker)

    @property
    def streak(self) -> int:
        return int(self._streak)

    def scale_tensor(self, device: torch.device) -> torch.Tensor:
        """float32, no dimensions."""
        if device not in self._scales:
            if not self._scales:
                self._move(device)
            self._scales[device] = torch.tensor(self.scale, dtype=torch.float32, device=device)
        return self._scales[device]

    def overflow_tensor(self, device: torch.device) -> torch.Tensor:
        """float32, no dimensions: not 0 once a gradient of this step was not finite."""
        if device not in self._overflows:
            self._overflows[device] = torch.zeros((), device=device)
        return self._overflows[device]

    def begin_step(self) -> None:
        """Called with the first backward of a step."""
        self._overflow = None

    def decide(self) -> torch.Tensor:
        """1 if the step under way is skipped, 0 if not; the scale is updated when first asked. Nothing waits
        for the device.

        Returns:
            float32, no dimensions, on the scale's device.
        """
        if self._overflow is None:
            home = self._tracker.device
            flags = [flag.to(home) for flag in self._overflows.values()]
            self._overflow = (sum(flags, torch.zeros((), device=home)) != 0).float()
            for flag in self._overflows.values():
                flag.zero_()
            if self.settings is not None and self._scales:
                self._update(self.settings, self._overflow != 0)
        return self._overflow

    def skips(self) -> bool:
        """Whether the step under way is skipped.

        Raises:
            LossScaleError: when the scale would fall below its minimum.
        """
        skips = bool(self.decide())
        self.check()
        return skips

    def check(self) -> None:
        """
        Raises:
            LossScaleError: when the scale would have fallen below its minimum.
        """
        if self.settings is None or not self._fails:
            return
        self._fails.zero_()
        lower = self.scale * self.settings.backoff_factor
        raise LossScaleError(
            f"option 'loss_scale': gradients overflow at scale {self.scale:g}, and {lower:g} would be "
            f"below min_scale={self.settings.min_scale:g}; the loss or the model is not finite, or min_scale "
            "is too high. The optimizer's step was not taken"
        )

    def check_without_waiting(self) -> None:
        """As `check`, but of what the device has told so far."""
        if self._fails.is_cpu:
            self.check()
            return
        if self._told is not None:
            if not self._told.query():
                return
            if self._news:
                self.check()
        self._news = torch.empty((), pin_memory=True).copy_(self._fails, non_blocking=True)
        self._told = torch.Event(self._fails.device)
        self._told.record()

    def set(self, scale: float) -> None:
        """Give it another value, from the next backward on."""
        if not 0 < scale < math.inf:
            raise ValueError(f"loss scale: got {scale!r}; expected a positive finite number")
        self._initial = scale
        for tensor in self._scales.values():
            tensor.fill_(scale)

    def _update(self, settings: LossScale, overflow: torch.Tensor) -> None:
        scale = next(iter(self._scales.values()))
        streak = torch.where(overflow, self._streak + 1, 0)
        tracker = torch.where(overflow, 0, self._tracker + 1)
        backs_off = streak >= settings.patience
        grows = tracker >= settings.growth_interval
        lower = scale * settings.backoff_factor
        higher = (scale * settings.growth_factor).clamp(max=settings.max_scale)
        fails = backs_off & (lower < settings.min_scale)
        new = torch.where(grows, higher, torch.where(backs_off & ~fails, lower, scale))
        self._streak = torch.where(backs_off, 0, streak)
        self._tracker = torch.where(grows, 0, tracker)
        self._fails = self._fails.maximum(fails.float())
        for tensor in self._scales.values():
            tensor.copy_(new)

    def _move(self, device: torch.device) -> None:
        self._tracker = self._tracker.to(device)
        self._streak = self._streak.to(device)
        self._fails = self._fails.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "streak": self.streak,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set(float(state["scale"]))
        self._tracker.fill_(int(state["growth_tracker"]))
        self._streak.fill_(int(state["streak"]))


def make_scaler(option: LossScale | float) -> Scaler:
    """The scaler that option `loss_scale` asks for."""
    if isinstance(option, LossScale):
        return Scaler(option, option.init)
    return Scaler(None, option)
