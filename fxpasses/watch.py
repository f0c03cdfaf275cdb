"""What is known of a model's gradient norms across steps: are they steady, was there a spike?

Norms are those before clipping. They are the same on all ranks, so that all come to the same conclusions.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fxpasses.config import Watching
from fxpasses.distributed.group import global_rank

# A norm is a spike if it is more than this many times the running mean.
SPIKE = 5.0
REMEMBERED = 100  # events


@dataclasses.dataclass(frozen=True)
class Event:
    """Something worth a look.

    Attributes:
        step: counted from 1.
        what: `"spike"`, or `"decay"` (the limit was lowered).
        value: the norm, or the new limit.
    """

    step: int
    what: str
    value: float


@dataclasses.dataclass
class Series:
    """A number across steps.

    Attributes:
        count: how many there were.
        mean: exponential moving average, of about as many as a window has; the plain mean of the first ones.
        window: the last ones.
    """

    count: int = 0
    mean: float = 0.0
    window: list[float] = dataclasses.field(default_factory=list)

    def add(self, value: float, steps: int) -> None:
        """Take in one more, with windows of so many steps."""
        self.count += 1
        self.mean += max(1 / self.count, 2 / (steps + 1)) * (value - self.mean)
        self.window = [*self.window, value][-steps:]


class Watch:
    """Looks at each step's gradient norm and loss scale.

    A window is unsteady if the standard deviation of its norms is more than `ratio` times their mean. Each norm
    is judged in one window only, so that a single spike makes a single window unsteady.

    Attributes:
        step: how many steps it has seen.
        norms, loss_scales: over these steps, but for norms that were not finite.
        events: the last ones.
    """

    def __init__(self, settings: Watching) -> None:
        self.settings = settings
        self.step = 0
        self.norms, self.loss_scales = Series(), Series()
        self.events: collections.deque[Event] = collections.deque(maxlen=REMEMBERED)
        self._unsteady = 0  # windows in a row

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory in use so far: of the accelerator, if there is one, else of this process."""
        if torch.accelerator.is_available():
            return torch.accelerator.max_memory_allocated()
        import resource  # not on all systems

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def observe(self, norm: float, loss_scale: float | None = None) -> bool:
        """Take in a step; returns whether the limit is to be lowered.

        Args:
            norm: of its gradients, before clipping.
            loss_scale: None without one; with one, a norm that is not finite is nothing to worry about.
        """
        self.step += 1
        steps = self.settings.window
        if loss_scale is not None:
            self.loss_scales.add(loss_scale, steps)
        if not math.isfinite(norm):
            if loss_scale is None:
                self._report("spike", norm, f"the gradient norm is {norm}")
            return False
        if self.norms.count >= steps and norm > SPIKE * self.norms.mean:
            mean = f"more than {SPIKE:g} times its running mean of {self.norms.mean:g}"
            self._report("spike", norm, f"the gradient norm is {norm:g}, {mean}")
        self.norms.add(norm, steps)
        return self.norms.count % steps == 0 and self._judge()

    def report_decay(self, limit: float) -> None:
        """Say that the limit was lowered."""
        text = f"{self.settings.times} windows of gradient norms in a row were unsteady"
        self._report("decay", limit, f"{text}; 'clip_norm' is {limit:g} from now on")

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "unsteady": self._unsteady,
            "norms": dataclasses.asdict(self.norms),
            "loss_scales": dataclasses.asdict(self.loss_scales),
            "events": [dataclasses.astuple(event) for event in self.events],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self._unsteady = int(state["step"]), int(state["unsteady"])
        self.norms, self.loss_scales = Series(**state["norms"]), Series(**state["loss_scales"])
        self.events.clear()
        self.events.extend(Event(*event) for event in state["events"])

    def _judge(self) -> bool:
        """Whether the window that is over makes too many unsteady ones in a row."""
        mean, deviation = statistics.fmean(self.norms.window), statistics.pstdev(self.norms.window)
        self._unsteady = self._unsteady + 1 if deviation > self.settings.ratio * mean else 0
        if self._unsteady < self.settings.times:
            return False
        self._unsteady = 0
        return True

    def _report(self, what: str, value: float, text: str) -> None:
        self.events.append(Event(self.step, what, value))
        if global_rank() == 0:  # it is the same on all
            warnings.warn(f"step {self.step}: {text}", stacklevel=2)
