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

    The value and the overflow flag are tensors, which compiled backwards read and write: no recompilation when
    they change. The host reads the flag once a step.

    Args:
        settings: how it changes; None for a constant scale.
        scale: the value to start from.
    """

    def __init__(self, settings: LossScale | None, scale: float) -> None:
        self.settings = settings
        self.scale = scale
        self.growth_tracker = 0  # finite steps since the last change
        self.streak = 0  # non-finite steps in a row since the last change
        self._skips: bool | None = None  # what was decided for the step under way
        self._scales: dict[torch.device, torch.Tensor] = {}
        self._overflows: dict[torch.device, torch.Tensor] = {}

    def is_like(self, other: Scaler) -> bool:
        """Whether both were asked for by the same option."""
        if self.settings is None and other.settings is None:
            return self.scale == other.scale
        return self.settings == other.settings

    def scale_tensor(self, device: torch.device) -> torch.Tensor:
        """float32, no dimensions."""
        if device not in self._scales:
            self._scales[device] = torch.tensor(self.scale, dtype=torch.float32, device=device)
        return self._scales[device]

    def overflow_tensor(self, device: torch.device) -> torch.Tensor:
        """float32, no dimensions: not 0 once a gradient of this step was not finite."""
        if device not in self._overflows:
            self._overflows[device] = torch.zeros((), device=device)
        return self._overflows[device]

    def begin_step(self) -> None:
        """Called with the first backward of a step."""
        self._skips = None

    def skips(self) -> bool:
        """Whether the step under way is skipped: decided, and the scale updated, when first asked.

        Raises:
            LossScaleError: when the scale would fall below its minimum.
        """
        if self._skips is None:
            self._skips = any(flag.item() != 0 for flag in self._overflows.values())
            for flag in self._overflows.values():
                flag.zero_()
            if self.settings is not None:
                self._update(self.settings, self._skips)
        return self._skips

    def set(self, scale: float) -> None:
        """Give it another value, from the next backward on."""
        if not 0 < scale < math.inf:
            raise ValueError(f"loss scale: got {scale!r}; expected a positive finite number")
        self.scale = scale
        for tensor in self._scales.values():
            tensor.fill_(scale)

    def _update(self, settings: LossScale, overflow: bool) -> None:
        if not overflow:
            self.streak = 0
            self.growth_tracker += 1
            if self.growth_tracker >= settings.growth_interval:
                self.growth_tracker = 0
                self.set(min(self.scale * settings.growth_factor, settings.max_scale))
            return
        self.growth_tracker = 0
        self.streak += 1
        if self.streak < settings.patience:
            return
        self.streak = 0
        lower = self.scale * settings.backoff_factor
        if lower < settings.min_scale:
            raise LossScaleError(
                f"option 'loss_scale': gradients overflow at scale {self.scale:g}, and {lower:g} would be "
                f"below min_scale={settings.min_scale:g}; the loss or the model is not finite, or min_scale is "
                "too high. The optimizer's step was not taken"
            )
        self.set(lower)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "streak": self.streak,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set(float(state["scale"]))
        self.growth_tracker, self.streak = int(state["growth_tracker"]), int(state["streak"])


def make_scaler(option: LossScale | float | None) -> Scaler | None:
    """The scaler that option `loss_scale` asks for."""
    if option is None:
        return None
    if isinstance(option, LossScale):
        return Scaler(option, option.init)
    return Scaler(None, option)
