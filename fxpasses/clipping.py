"""The limit of a model's gradient norm across steps, and the guard that it is the norm of all its gradients.

A compiled backward knows the norm of the gradients that it makes. It is the model's if that backward makes all
gradients of a step: the last of several micro-batches does, one of several graphs does not.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxpasses.config import Watching
from fxpasses.coverage import place_of
from fxpasses.scaler import Scaler
from fxpasses.watch import Watch

_INSTEAD = (
    "leave the option out and call torch.nn.utils.clip_grad_norm_(model.parameters(), ...) in front of "
    "optimizer.step(): .grad is reduced and has its own value"
)
# How much larger than their norm gradients may be found: they may be rounded to bf16.
_ROUNDING = 1.01


class Clipping:
    """The limit, a tensor that compiled backwards read: no recompilation when it changes.

    Args:
        limit: where it starts.
        settings: how norms are watched; None leaves the limit as it is.
    """

    def __init__(self, limit: float, settings: Watching | None) -> None:
        self.limit = limit
        self.watch = None if settings is None else Watch(settings)
        self._limits: dict[torch.device, torch.Tensor] = {}
        self._clipped: dict[int, weakref.ref[torch.Tensor]] = {}  # by id
        self._backward: int | None = None
        self._step_ended = True
        self._compared = False

    def limit_tensor(self, device: torch.device) -> torch.Tensor:
        """float32, no dimensions."""
        if device not in self._limits:
            self._limits[device] = torch.tensor(self.limit, dtype=torch.float32, device=device)
        return self._limits[device]

    def begin(self, parameters: Sequence[torch.Tensor], backward: int, code: str) -> None:
        """A backward is about to clip.

        Args:
            parameters: whose gradients it makes.
            backward: identity of the call of `backward()`.
            code: which code it is the backward of.

        Raises:
            RuntimeError: when gradients of this step have been clipped already.
        """
        if not parameters:
            return
        if not self._step_ended and (backward == self._backward or self._holds_gradients()):
            raise RuntimeError(
                f"option 'clip_norm': the backward of {code} is not the first of its step, so the gradients of "
                "the first were clipped by the norm of a part of them. One graph must make all gradients of a "
                "step: compile without graph breaks, and use option 'accumulate' or no_sync() for all "
                f"backwards but the last; or {_INSTEAD}"
            )
        self._clipped = {id(p): weakref.ref(p) for p in parameters}
        self._backward, self._step_ended = backward, False

    def check_optimizer(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor | None) -> None:
        """Raise if an optimizer is about to step on gradients that are not part of the norm.

        Args:
            norm: of the step under way, before it was clipped.

        Raises:
            RuntimeError: naming the first such parameter; at the first step, also for gradients that are larger
                than the backward made them.
        """
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            gradient, known = parameter.grad, self._clipped.get(id(parameter))
            is_known = known is not None and known() is parameter
            if gradient is not None and not is_known and gradient.any():
                raise RuntimeError(
                    f"option 'clip_norm': the gradient of {place_of(optimizer, parameter)} is not part of the "
                    "norm by which the others were clipped: another graph made it, or code that was not "
                    f"compiled. Compile all that this optimizer trains as one graph, or {_INSTEAD}"
                )
        if norm is not None and not self._compared:
            self._compared = True
            self._compare(norm.item())

    def end_step(self, norm: torch.Tensor, scaler: Scaler | None) -> None:
        """Called by each optimizer before it steps. Waits for the device if norms are watched."""
        if self._step_ended:
            return
        self._step_ended = True
        if self.watch is None:
            return
        if self.watch.observe(norm.item(), None if scaler is None else scaler.scale):
            self._set(self.limit * self.watch.settings.decay)
            self.watch.report_decay(self.limit)

    def state_dict(self) -> dict[str, Any]:
        assert self.watch is not None, "without it, the limit is the option's"
        return {"limit": self.limit, **self.watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as saved. Without option `watch` the limit stays the option's."""
        if self.watch is not None:
            self._set(float(state["limit"]))
            self.watch.load_state_dict(state)

    def _set(self, limit: float) -> None:
        self.limit = limit
        for tensor in self._limits.values():
            tensor.fill_(limit)

    def _holds_gradients(self) -> bool:
        """Whether clipped gradients still are where the next ones will be added to them."""
        return any(gradient.any() for gradient in self._gradients())

    def _gradients(self) -> list[torch.Tensor]:
        parameters = [reference() for reference in self._clipped.values()]
        return [p.grad for p in parameters if p is not None and p.grad is not None]

    def _compare(self, norm: float) -> None:
        """A parameter that is also used outside of the graph gets a gradient there, which nothing clipped."""
        found = torch.nn.utils.get_total_norm(self._gradients()).item()
        made = min(norm, self.limit)
        if math.isfinite(found) and found > made * _ROUNDING:
            raise RuntimeError(
                f"option 'clip_norm': the norm of the gradients is {found:g} at the first optimizer step, but "
                f"the compiled backward left {made:g}: something else added to them, such as a use of a "
                "parameter outside of what is compiled. Compile that as well (or change gradients behind "
                f"clipping by hand: {_INSTEAD})"
            )
