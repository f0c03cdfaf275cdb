"""`GradScaler`: the calling convention of `torch.amp.GradScaler` for a loss scale that is in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxpasses.config import LossScale
from fxpasses.owners import runtime, runtimes_of
from fxpasses.runtimes import Runtime
from fxpasses.scaler import Scaler


class GradScaler:
    """Drop-in for `torch.amp.GradScaler` where a model is compiled with option `loss_scale`.

    The graph scales and unscales, and an optimizer's own `step()` is a no-op after an overflow, so these
    methods have little left to do; training loops that call them work unchanged.

    Args:
        device: as for torch's; not needed.
        enabled: False makes every method do nothing.
        model: the model, where `get_scale` and `load_state_dict` are called before its optimizer's first step.

    Raises:
        ValueError: for torch's settings (`init_scale`, …): they belong in the option.
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        enabled: bool = True,
        model: torch.nn.Module | None = None,
        **settings: Any,
    ) -> None:
        if settings:
            scale = {key.removesuffix("_scale"): value for key, value in settings.items()}
            raise ValueError(
                f"GradScaler: got {', '.join(settings)}; the scale is in the graph, so say it when compiling: "
                f"torch.compile(model, backend='hardened', options={{'loss_scale': {scale}}})"
            )
        self._enabled = enabled
        self._runtimes: list[Runtime] = [] if model is None else [runtime(model)]

    def is_enabled(self) -> bool:
        return self._enabled

    def scale(self, outputs: Any) -> Any:
        """The loss as it is: its backward is scaled inside the graph."""
        return outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: `.grad` always has its own value."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`, which does nothing if a gradient overflowed.

        Raises:
            RuntimeError: when no parameter of this optimizer belongs to a model with a loss scale.
        """
        self._runtimes += [r for r in runtimes_of(optimizer) if r not in self._runtimes]
        if self._enabled and not self._scalers():
            raise RuntimeError(
                "GradScaler: no parameter of this optimizer belongs to a model that was compiled with option "
                "'loss_scale' and has run; pass options={'loss_scale': 'dynamic'} to torch.compile"
            )
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Nothing, since each step updates the scale once; or another scale from now on."""
        if new_scale is not None:
            for scaler in self._scalers():
                scaler.set(float(new_scale))

    def get_scale(self) -> float:
        """The current scale; 1.0 if disabled.

        Raises:
            RuntimeError: before the model is known and has run.
        """
        return self._scaler().scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        return self._settings().growth_factor

    def get_backoff_factor(self) -> float:
        return self._settings().backoff_factor

    def get_growth_interval(self) -> int:
        return self._settings().growth_interval

    def state_dict(self) -> dict[str, Any]:
        """In the form of `torch.amp.GradScaler`; empty if disabled. `fxpasses.runtime(model).state_dict()`
        holds the scale as well: save either.
        """
        if not self._enabled:
            return {}
        settings = self._settings()
        return {
            "scale": self.get_scale(),
            "growth_factor": settings.growth_factor,
            "backoff_factor": settings.backoff_factor,
            "growth_interval": settings.growth_interval,
            "_growth_tracker": self._scaler().growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over scale and growth tracker that `state_dict`, or torch's, returned; the settings stay the
        option's. Also before the first forward, given `model`.

        Raises:
            ValueError: for an empty state, which a disabled scaler saved.
            RuntimeError: before the model is known.
        """
        if not self._enabled:
            return
        if not state:
            raise ValueError(
                "GradScaler: the state dict is empty; it was saved by a disabled scaler"
            )
        if not self._runtimes:
            raise RuntimeError(_UNKNOWN)
        for found in self._runtimes:
            found.load_scale(
                {"scale": state["scale"], "growth_tracker": state["_growth_tracker"], "streak": 0}
            )

    def _scaler(self) -> Scaler:
        scalers = self._scalers()
        if not scalers:
            raise RuntimeError(_UNKNOWN)
        return scalers[0]

    def _scalers(self) -> list[Scaler]:
        return list({id(s): s for r in self._runtimes if (s := r.scaler) is not None}.values())

    def _settings(self) -> LossScale:
        return self._scaler().settings or LossScale()


_UNKNOWN = (
    "GradScaler: its model is not known yet; pass it, GradScaler(model=model), or call this after the "
    "first step"
)
