"""`optimizer`: an update that happens as a whole or not at all, decided where the gradients are.

    overflow of any gradient ──┐
    gradients ─▶ fp32 ─────────┴▶ fused kernel: masters, moments, step counts ─▶ low-precision weights

The kernels are torch's fused ones (`torch._fused_adamw_` and others), which take the overflow flag as a tensor:
the host waits for nothing. `.grad` has been unscaled in the backward's graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxpasses.interrupts import uninterrupted
from fxpasses.owners import DECIDES_ON_DEVICE, runtimes_of, watch_optimizers

LOW = (torch.bfloat16, torch.float16)
MASTER = "master"


def optimizer(of: torch.optim.Optimizer, *, masters: bool = False) -> AtomicOptimizer:
    """The same optimizer with an atomic update; use it in place of the one given.

    A step that overflowed (option `loss_scale`) changes nothing, and the host reads no flag for it: on an
    accelerator the step is not waited for. Ctrl-C and SIGTERM wait until the update is over. Parameter groups,
    state and `state_dict()` have torch's form; schedulers and checkpoints work as with the optimizer given.

    Args:
        of: `torch.optim.SGD`, `Adam` or `AdamW`. Its parameter groups and state are taken over.
        masters: keep float32 masters of parameters that are bf16 or fp16, as `state[parameter]["master"]`. They
            are updated, and the parameters become their rounded values.

    Raises:
        ValueError: for another optimizer, or a setting that the fused kernels lack.
    """
    return AtomicOptimizer(of, masters)


class AtomicOptimizer(torch.optim.Optimizer):
    """See `optimizer`."""

    def __init__(self, of: torch.optim.Optimizer, masters: bool = False) -> None:
        self._kind = _kind_of(of)
        self._masters = masters
        # Versions of the low-precision parameters as this optimizer wrote them.
        self._written: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        super().__init__([dict(group) for group in of.param_groups], dict(of.defaults))
        self.state.update(of.state)
        setattr(self, DECIDES_ON_DEVICE, True)
        watch_optimizers()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _check_settings(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, or none of them.

        Raises:
            LossScaleError: see option `loss_scale`; on an accelerator, some step later.
            RuntimeError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owners = runtimes_of(self)
        skips = [s for owner in owners if (s := owner.end_step_on_device()) is not None]
        # All that can fail, above all for lack of memory, comes before the first write.
        updates = [u for group in self.param_groups for u in self._updates(group)]
        with uninterrupted():
            for update in updates:
                self._kind.run(update, _on(update.masters[0].device, skips))
                if update.low:
                    torch._foreach_copy_(update.low, update.low_masters)
            for owner in owners:
                owner.strike_update()
            for update in updates:
                for parameter in update.low:
                    self._written[parameter] = parameter._version
        for owner in owners:
            if owner.scaler is not None:
                owner.scaler.check_without_waiting()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, but what is float32 stays so: torch casts state to the parameter's dtype."""
        super().load_state_dict(dict(state_dict))
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:  # saved by a version of torch that lacked a setting
            group.update({key: group.get(key, value) for key, value in self.defaults.items()})
            _check_settings(group)
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and self.state[parameter][key].dtype != value.dtype:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)

    def _updates(self, group: dict[str, Any]) -> Iterable[Update]:
        """One for each device and dtype."""
        parts: dict[tuple[torch.device, torch.dtype], Update] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    "fxpasses.optimizer: got a sparse gradient, which fused kernels can't take; give this "
                    "parameter an optimizer of its own"
                )
            master = self._master(parameter)
            key = (master.device, master.dtype)
            update = parts.setdefault(key, Update(group))
            update.masters.append(master)
            update.gradients.append(parameter.grad.to(master.dtype))
            update.states.append(self._kind.state(self.state[parameter], master, group))
            if master is not parameter:
                update.low.append(parameter)
                update.low_masters.append(master)
        return parts.values()

    def _master(self, parameter: Tensor) -> Tensor:
        """What is updated for a parameter: itself, or its float32 master.

        Where something else has written the parameter since (a checkpoint was loaded, rank 0's values were
        taken), the master is made anew, unless it rounds to what is there.
        """
        if not self._masters or parameter.dtype not in LOW:
            return parameter
        state = self.state[parameter]
        if self._written.get(parameter) != parameter._version:
            known = state.get(MASTER)
            if known is None or not torch.equal(known.to(parameter.dtype), parameter):
                state[MASTER] = parameter.detach().float()
            self._written[parameter] = parameter._version
        return state[MASTER]


@dataclasses.dataclass
class Update:
    """One call of a fused kernel: lists over parameters, all of one device and dtype.

    Attributes:
        group: the parameter group, for its settings.
        masters: what is updated.
        gradients: of the masters' dtype.
        states: of each parameter.
        low: the parameters that are written from masters.
        low_masters: the masters of these.
    """

    group: Mapping[str, Any]
    masters: list[Tensor] = dataclasses.field(default_factory=list)
    gradients: list[Tensor] = dataclasses.field(default_factory=list)
    states: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    low: list[Tensor] = dataclasses.field(default_factory=list)
    low_masters: list[Tensor] = dataclasses.field(default_factory=list)

    def all(self, key: str) -> list[Tensor]:
        return [state[key] for state in self.states]


@dataclasses.dataclass(frozen=True)
class _Adam:
    """Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), as in `torch/optim/adam.py`."""

    decoupled: bool

    def state(
        self, state: dict[str, Any], master: Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for key in moments:
            if key not in state:
                state[key] = torch.zeros_like(master, memory_format=torch.preserve_format)
        step = state.get("step", 0.0)
        if not (isinstance(step, Tensor) and step.device == master.device):
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=master.device)
        return state

    def run(self, update: Update, skips: Tensor | None) -> None:
        group = update.group
        decoupled = self.decoupled or group.get("decoupled_weight_decay", False)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        beta1, beta2 = group["betas"]
        steps = update.all("step")
        torch._foreach_add_(steps, 1)
        kernel(
            update.masters,
            update.gradients,
            update.all("exp_avg"),
            update.all("exp_avg_sq"),
            update.all("max_exp_avg_sq") if group["amsgrad"] else [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            found_inf=skips,
        )
        if skips is not None:
            torch._foreach_sub_(steps, [skips] * len(steps))


class _SGD:
    """Stochastic gradient descent with momentum, as in `torch/optim/sgd.py`."""

    def state(
        self, state: dict[str, Any], master: Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        if group["momentum"] and state.get("momentum_buffer") is None:
            # Zeros, not torch's "first step" flag: whether a first step is skipped only the device knows.
            state["momentum_buffer"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state

    def run(self, update: Update, skips: Tensor | None) -> None:
        group = update.group
        torch._fused_sgd_(
            update.masters,
            update.gradients,
            update.all("momentum_buffer") if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            found_inf=skips,
        )


_KINDS: dict[type[torch.optim.Optimizer], _Adam | _SGD] = {
    torch.optim.SGD: _SGD(),
    torch.optim.Adam: _Adam(decoupled=False),
    torch.optim.AdamW: _Adam(decoupled=True),
}


def _kind_of(of: torch.optim.Optimizer) -> _Adam | _SGD:
    if type(of) not in _KINDS:
        raise ValueError(
            f"fxpasses.optimizer: got {type(of).__name__}; expected "
            f"{', '.join(kind.__name__ for kind in _KINDS)}. Any other optimizer works as it is: its step is "
            "skipped after an overflow"
        )
    return _KINDS[type(of)]


def _check_settings(group: Mapping[str, Any]) -> None:
    for setting in ("dampening", "differentiable"):
        if group.get(setting):
            raise ValueError(
                f"fxpasses.optimizer: got {setting}={group[setting]}, which an atomic update does not support; "
                "use the optimizer as it is: its step is skipped after an overflow"
            )


def _on(device: torch.device, skips: list[Tensor]) -> Tensor | None:
    """Whether any model's step is skipped, where the kernel wants it; None where none can be."""
    if not skips:
        return None
    return torch.stack([s.to(device) for s in skips]).amax()
