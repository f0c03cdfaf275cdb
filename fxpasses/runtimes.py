"""What a training program asks of the backend while it runs: last step, plan, state.

A `Runtime` belongs to a set of parameters: those of one module, or those that appear together in compiled
graphs (`owners.py` finds it by any of them).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpasses.clipping import Clipping
from fxpasses.config import Hardening, LossScale, Watching, nearest
from fxpasses.distributed.group import Group
from fxpasses.distributed.plans import PlannedCollective
from fxpasses.faults.arming import Faults
from fxpasses.faults.spec import UPDATE
from fxpasses.guards.alarms import Alarms
from fxpasses.guards.replicas import check_replicas
from fxpasses.levels import Branch
from fxpasses.scaler import Scaler, make_scaler
from fxpasses.shared import Shared
from fxpasses.state import STORE
from fxpasses.watch import Watch

STATE_DICT_VERSION = 1
# The runtime that each parameter belongs to now.
OWNER: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclasses.dataclass
class StepRecord:
    """What happened since the previous `optimizer.step()`.

    Attributes:
        backwards: backward graphs that ran.
        collectives: collectives that they issued.
        bytes: payload bytes of these on this rank.
        skipped: whether the optimizer's step was skipped (loss scaling).
        gradient_norm: of all gradients, before they were clipped (option `clip_norm`); float32, no dimensions.
    """

    backwards: int = 0
    collectives: int = 0
    bytes: int = 0
    skipped: bool = False
    gradient_norm: torch.Tensor | None = None

    def add(self, other: StepRecord) -> None:
        """Count in what happened elsewhere in the same step."""
        self.backwards += other.backwards
        self.collectives += other.collectives
        self.bytes += other.bytes
        self.skipped |= other.skipped
        self.gradient_norm = (
            self.gradient_norm if other.gradient_norm is None else other.gradient_norm
        )


class Runtime:
    """State and records of the compiled training of one set of parameters.

    Two runtimes become one when their parameters turn out to belong to the same model; both objects then
    answer for the whole.
    """

    def __init__(self) -> None:
        self._merged_into: Runtime | None = None
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter → name
        self._named_by = 0.0  # parameters of the module whose names are in use; 0: names of graphs
        self._plan: dict[Any, tuple[PlannedCollective, ...]] = {}  # by region
        self._branches: dict[Any, tuple[Branch, ...]] = {}  # by region
        self._step = StepRecord()
        self._skips: torch.Tensor | None = None  # of this step, while the host has not asked
        self._step_ended = False
        self._last_backward = -1  # of those that count as micro-batches
        self._micro_batch = 0  # of this step, from 1
        self._hardening: Hardening | None = None
        self._scaler = Shared[Scaler]("option 'loss_scale'")
        self._clipping = Shared[Clipping]("options 'clip_norm' and 'watch'")
        self._faults = Shared[Faults]("option 'faults'")
        self._alarms = Shared[Alarms]("option 'guards'")
        self._asked: list[bool] = []  # by `no_sync` (False) and `sync` (True), the innermost last

    @property
    def last_step(self) -> StepRecord:
        """The step that ran last; between a backward and `optimizer.step()`, the one under way.

        After a step of `fxpasses.optimizer` this waits for the device.
        """
        root = self.root
        if root._skips is not None:
            root._step.skipped, root._skips = bool(root._skips), None
        return dataclasses.replace(root._step)

    @property
    def plan(self) -> tuple[PlannedCollective, ...]:
        """The collectives of a backward in order, region after region as they were first compiled."""
        return tuple(c for planned in self.root._plan.values() for c in planned)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Of adaptive compression, what each parameter's gradient took in the last backward, and why."""
        return tuple(b for branches in self.root._branches.values() for b in branches)

    def state_dict(self) -> dict[str, Any]:
        """All state across steps: `{"version": 1, "state": {"kind/parameter.name": tensor}}`.

        The tensors are the live ones, as in `Module.state_dict`: clone them to keep them while training
        goes on. State is per rank: save it once a rank. It does not depend on how gradients were bucketed.
        After a change of the number of ranks, load the state that each continuing rank had; new ranks
        start fresh.

        Raises:
            ValueError: when two parameters go by one name, which compiled functions can't tell apart.
        """
        state = {
            f"{kind}/{name}": tensor
            for name, parameter in self._by_name().items()
            for kind, tensor in STORE.of(parameter)
        }
        found: dict[str, Any] = {"version": STATE_DICT_VERSION, "state": state}
        if self.scaler is not None:
            found["loss_scale"] = self.scaler.state_dict()
        if self.clipping is not None and self.watch is not None:
            found["watch"] = self.clipping.state_dict()
        if self.faults is not None:
            found["faults"] = self.faults.state_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; works before the first forward.

        Raises:
            ValueError: for another version, or a parameter that is not there.
        """
        version = state_dict.get("version")
        if version != STATE_DICT_VERSION:
            raise ValueError(
                f"state dict has version {version!r}; this fxpasses reads {STATE_DICT_VERSION}"
            )
        parameters = self._by_name()
        unknown = [key for key in state_dict["state"] if key.partition("/")[2] not in parameters]
        if unknown:
            name = unknown[0].partition("/")[2]
            raise ValueError(
                f"state {unknown[0]!r} belongs to no parameter of this model{nearest(name, parameters)}"
            )
        if "loss_scale" in state_dict:
            self.load_scale(state_dict["loss_scale"])
        if "watch" in state_dict:
            self.root._clipping.load(state_dict["watch"])
        if "faults" in state_dict:
            self.root._faults.load(state_dict["faults"])
        for key, tensor in state_dict["state"].items():
            kind, _, name = key.partition("/")
            STORE.put(parameters[name], kind, tensor)

    @property
    def scaler(self) -> Scaler | None:
        """The loss scale; None before the first training forward, or without one."""
        return self.root._scaler.value

    def use_scaler(self, option: LossScale | float) -> Scaler:
        """The loss scale that an option asks for.

        Raises:
            ValueError: when parts of one model ask for different ones.
        """
        return self.root._scaler.use(option, lambda: make_scaler(option))

    def load_scale(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved loss scale; works before the first forward."""
        self.root._scaler.load(state)

    @property
    def hardening(self) -> Hardening | None:
        """The options; None before the first training forward."""
        return self.root._hardening

    def note_options(self, hardening: Hardening) -> None:
        """Say what a part of the model was compiled with."""
        self.root._hardening = hardening

    @property
    def clipping(self) -> Clipping | None:
        """The limit of the gradients' norm; None before the first training forward, or without one."""
        return self.root._clipping.value

    @property
    def watch(self) -> Watch | None:
        """What is known of gradient norms; None before the first training forward, or without the option."""
        return None if self.clipping is None else self.clipping.watch

    def use_clipping(self, limit: float, settings: Watching | None) -> Clipping:
        """The clipping that options ask for.

        Raises:
            ValueError: when parts of one model ask for different ones.
        """
        asked = {"clip_norm": limit, "watch": settings}
        return self.root._clipping.use(asked, lambda: Clipping(limit, settings))

    @property
    def faults(self) -> Faults | None:
        """What is injected (option `faults`); None before the first forward, or without the option."""
        return self.root._faults.value

    def use_faults(self, text: str, rank: int) -> Faults:
        """The faults that the option asks for.

        Raises:
            ValueError: when parts of one model ask for different ones.
        """
        return self.root._faults.use(text, lambda: Faults(text, rank))

    @property
    def alarms(self) -> Alarms | None:
        """What guards found (option `guards`); None before the first forward, or without the option."""
        return self.root._alarms.value

    def use_alarms(self, text: str, group: Group) -> Alarms:
        """Those that the option asks for.

        Raises:
            ValueError: when parts of one model ask for different ones.
        """
        return self.root._alarms.use(text, lambda: Alarms(text, group))

    def check_replicas(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if parameters or state of an optimizer differ over the ranks, at the steps that are to be."""
        alarms = self.alarms
        if alarms is not None and alarms.compares_replicas:
            check_replicas(alarms.group, optimizer, self.names())

    def strike_update(self) -> None:
        """Called when an optimizer of ours has updated parameters."""
        faults = self.faults
        if faults is not None and faults.has(UPDATE):
            faults.update(self.names())

    def _by_name(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for parameter, name in self.root._names.items():
            if name in found:
                raise ValueError(
                    f"two parameters are named {name!r}: they met in one compiled function; call "
                    "fxpasses.runtime(module) once with a module that holds both, so that names tell them "
                    "apart"
                )
            found[name] = parameter
        return found

    @property
    def root(self) -> Runtime:
        """The runtime that this one has become part of; itself at first."""
        return self if self._merged_into is None else self._merged_into.root

    def adopt(self, named: Mapping[str, torch.Tensor], named_by: float = 0) -> None:
        """Make parameters this runtime's own.

        Args:
            named_by: parameters of the module that these names come from. Names of a larger module
                replace those of its parts and of graphs; a parameter that has no name yet gets this one.
        """
        better = named_by > self._named_by
        for name, parameter in named.items():
            if better or parameter not in self._names:
                self._names[parameter] = name
            OWNER[parameter] = self
        self._named_by = max(self._named_by, named_by)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add to `.grad` on this rank alone and send nothing; the next one that synchronises
        reduces the total.

        Every rank must use it for the same backwards. Where `.grad` already holds a reduced gradient, it
        becomes this rank's share of it: with `reduce="sum"` it is divided by the number of ranks.
        """
        return self._asking(False)

    def sync(self) -> AbstractContextManager[None]:
        """Backwards inside synchronise, whatever the option `accumulate` or a `no_sync` around it says. For
        the last micro-batch of an epoch that comes short.
        """
        return self._asking(True)

    @contextlib.contextmanager
    def _asking(self, synchronise: bool) -> Iterator[None]:
        self.root._asked.append(synchronise)
        try:
            yield
        finally:
            self.root._asked.pop()  # it may have become part of another in between

    def synchronises(self, backward: int, accumulate: int) -> bool:
        """Whether a backward is to be reduced.

        Args:
            backward: identity of the call of `backward()`; several graphs may run in one.
            accumulate: micro-batches to a step.
        """
        root = self.root
        if root._step_ended and backward != root._last_backward:
            root._micro_batch = 0
        if backward != root._last_backward:
            root._last_backward = backward
            root._micro_batch += 1
        return root._asked[-1] if root._asked else root._micro_batch % accumulate == 0

    def names(self) -> dict[str, torch.Tensor]:
        """Parameters by name, as far as names tell them apart."""
        return {name: parameter for parameter, name in self.root._names.items()}

    def record_plan(self, region: Any, plan: tuple[PlannedCollective, ...]) -> None:
        """What the backward of a region sends; it replaces what an earlier compilation of it said."""
        self.root._plan[region] = plan

    def record_branches(self, region: Any, branches: tuple[Branch, ...]) -> None:
        """What adaptive compression chose for a backward of a region."""
        self.root._branches[region] = branches

    def record_backward(
        self, plan: tuple[PlannedCollective, ...], norm: torch.Tensor | None = None
    ) -> None:
        """Count a backward in the step under way, and note the norm of its gradients."""
        root = self.root
        if root._step_ended:
            root._step, root._skips, root._step_ended = StepRecord(), None, False
            if root.scaler is not None:
                root.scaler.begin_step()
        root._step.add(StepRecord(backwards=1, gradient_norm=norm))
        root.record_collectives(plan)

    def record_collectives(self, plan: tuple[PlannedCollective, ...]) -> None:
        """Count what was sent in the step under way."""
        self.root._step.add(StepRecord(0, len(plan), sum(c.bytes for c in plan)))

    def end_step(self) -> bool:
        """Called by each optimizer before it steps; whether the step is skipped."""
        root = self.root
        skips = root._end_checks()
        root._step_ended = True
        if root.scaler is not None:
            root._step.skipped = root.scaler.skips()
        root._step.skipped |= skips
        root._end_clipping()
        return root._step.skipped

    def end_step_on_device(self) -> torch.Tensor | None:
        """The same without waiting for the device: 1 if the step is skipped; None where none can be."""
        root = self.root
        skips = root._end_checks()
        root._step_ended = True
        if root.scaler is not None:
            root._skips = root.scaler.decide()
        if skips:
            root._skips = torch.ones(())
        root._end_clipping()
        return root._skips

    def _end_checks(self) -> bool:
        """Once a step, whatever the number of optimizers; whether guards want it skipped."""
        if self._step_ended:
            return self._step.skipped
        if self.faults is not None:
            self.faults.end_step()
        return self.alarms is not None and self.alarms.end_step()

    def _end_clipping(self) -> None:
        if self.clipping is not None and self._step.gradient_norm is not None:
            self.clipping.end_step(self._step.gradient_norm, self.scaler)

    def check_clipping(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer is about to step on gradients that are not part of the norm."""
        if self.clipping is not None:
            self.clipping.check_optimizer(optimizer, self.root._step.gradient_norm)

    def absorb(self, other: Runtime) -> None:
        """Take over what another runtime holds."""
        self.adopt({name: parameter for parameter, name in other._names.items()}, other._named_by)
        self._plan.update(other._plan)
        self._branches.update(other._branches)
        if self._step_ended and not other._step_ended:
            self._step, self._step_ended = other._step, False
        elif self._step_ended == other._step_ended:
            self._step.add(other._step)
        self._asked += other._asked
        self._last_backward = max(self._last_backward, other._last_backward)
        self._micro_batch = max(self._micro_batch, other._micro_batch)
        self._hardening = self._hardening or other._hardening
        self._scaler.absorb(other._scaler)
        self._clipping.absorb(other._clipping)
        self._faults.absorb(other._faults)
        self._alarms.absorb(other._alarms)
        other._merged_into = self
