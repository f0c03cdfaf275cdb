"""What a unit knows of the tensors that one module brings; one compiled unit may serve several modules."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping

import torch

from fxpasses.clipping import Clipping
from fxpasses.compression import Levels
from fxpasses.config import LossScale, Watching
from fxpasses.coverage import Reduced, reduced
from fxpasses.distributed import first_use
from fxpasses.distributed.agreement import halves
from fxpasses.distributed.group import is_fake
from fxpasses.distributed.plans import Plan
from fxpasses.facts import form_of
from fxpasses.faults.arming import Faults
from fxpasses.guards.alarms import Alarms
from fxpasses.owners import owner_of, owns
from fxpasses.runtimes import Runtime
from fxpasses.scaler import Scaler, make_scaler
from fxpasses.unit import Unit


@dataclasses.dataclass(frozen=True)
class Watched:
    """What is injected into a forward of one module, and what guards find in it.

    Attributes:
        references: to the parameters and buffers that are inputs, in order.
        runtime: of the parameters; None without any.
        region: identity of the code, over this module.
        faults: that are injected, if the options ask for some.
        alarms: of guards, likewise.
    """

    references: list[weakref.ref[torch.Tensor]]
    runtime: Runtime | None
    region: tuple[int, ...]
    faults: Faults | None
    alarms: Alarms | None

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are its inputs, and nothing has changed about whose they are."""
        if self.runtime is not None and tensors and not owns(self.runtime, tensors[0]):
            return False
        return all(r() is t for r, t in zip(self.references, tensors, strict=True))


@dataclasses.dataclass(frozen=True)
class Binding(Watched):
    """The tensors of one module that trains, by the unit's names.

    Attributes:
        reach: to parameters and buffers that the code can reach, whether this rank's graph uses them or not.
        records: of the parameters whose gradients the backward reduces over several ranks.
        scaler: the loss scale, if the options ask for one.
        clipping: of the gradients' norm, likewise.
        plan: what a synchronising backward sends; of compression that changes, at its first levels.
        digests: of that plan with the levels that have been chosen so far.
    """

    reach: Mapping[str, weakref.ref[torch.Tensor]]
    records: Mapping[str, Reduced]
    scaler: Scaler | None
    clipping: Clipping | None
    plan: Plan
    digests: dict[Levels | None, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def reachable(self, name: str) -> torch.Tensor | None:
        reference = self.reach.get(name)
        return None if reference is None else reference()

    def agreed(self, name: str) -> torch.Tensor:
        """A tensor that the ranks have just agreed on, which therefore can be reached."""
        tensor = self.reachable(name)
        assert tensor is not None, f"{name!r} was reachable when the ranks agreed"
        return tensor

    def plan_at(self, levels: Levels | None) -> Plan:
        """The plan with these levels of compression."""
        return self.plan if levels is None else dataclasses.replace(self.plan, levels=levels)

    def digest(self, levels: Levels | None = None) -> tuple[int, int]:
        """Two integers that stand for that plan."""
        if levels not in self.digests:
            self.digests[levels] = halves(self.plan_at(levels).digest())
        return self.digests[levels]

    def whole_plan(self, levels: Levels | None = None) -> Plan:
        """That plan, with what could take part."""
        found = [(name, t) for name, r in self.reach.items() if (t := r()) is not None]
        forms = [
            form_of(name, t)
            for name, t in found
            if t.requires_grad or not isinstance(t, torch.nn.Parameter)
        ]
        return dataclasses.replace(self.plan_at(levels), reachable=tuple(forms))


def watch(
    unit: Unit, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> Watched:
    """The same of a call that records no backward: it makes nothing alike."""
    owner = owner_of(parameters) if parameters else None
    return Watched(
        references=[weakref.ref(t) for t in (*parameters.values(), *buffers.values())],
        runtime=owner,
        region=(unit.region, *map(id, parameters.values())),
        faults=faults_of(unit, owner),
        alarms=alarms_of(unit, owner),
    )


def bind(
    unit: Unit, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> Binding:
    """What is known of the tensors of a call. On their first use they are made alike on all ranks.

    Raises:
        RuntimeError: when they differ over the ranks, or a rank does not come.
    """
    inputs = {**parameters, **buffers}
    reach = _reach(unit, parameters)
    reached = {n: t for n, t in reach.items() if isinstance(t, torch.nn.Parameter)}
    trained: dict[str, torch.Tensor] = {**reached, **parameters}
    owner = owner_of(trained, _weight(unit, trained)) if trained else None
    everything = reach | inputs
    instance: tuple[int, ...] = ()
    if unit.group.size > 1:
        instance = first_use.make_alike(unit.group, everything, unit.scope.code)
        trainable = [t for t in everything.values() if isinstance(t, torch.nn.Parameter)]
        for parameter in [] if is_fake(unit.group) else trainable:
            reduced(parameter, unit.group)  # or an optimizer shall notice that it is not
    plan = unit.plan(instance)
    region = (unit.region, *map(id, list(everything.values())[:1]))
    if owner is not None:
        owner.record_plan(region, plan.collectives)
        owner.note_options(unit.hardening)
    names = {name for c in plan.collectives for name in c.parameters if unit.group.size > 1}
    return Binding(
        references=[weakref.ref(t) for t in inputs.values()],
        reach={name: weakref.ref(t) for name, t in everything.items()},
        runtime=owner,
        region=region,
        records={name: reduced(p, unit.group) for name, p in parameters.items() if name in names},
        scaler=_scaler(unit, owner),
        clipping=_clipping(unit, owner),
        faults=faults_of(unit, owner),
        alarms=alarms_of(unit, owner),
        plan=plan,
    )


def _weight(unit: Unit, trained: Mapping[str, torch.Tensor]) -> float:
    """How much these names count: a bit less than those of a module of this size that a program names."""
    return len(trained) - 0.5 if unit.scope.is_module else 0


def _scaler(unit: Unit, owner: Runtime | None) -> Scaler | None:
    """The model's. A region without parameters has one of its own, which never changes: it neither makes
    gradients that could overflow, nor knows whose they are.
    """
    option = LossScale.parse(unit.hardening.loss_scale)
    if option is None:
        return None
    return make_scaler(option) if owner is None else owner.use_scaler(option)


def _clipping(unit: Unit, owner: Runtime | None) -> Clipping | None:
    if owner is None or unit.clip_norm is None:
        return None
    return owner.use_clipping(unit.clip_norm, Watching.parse(unit.hardening.watch))


def faults_of(unit: Unit, owner: Runtime | None) -> Faults | None:
    """The model's. A region without parameters has faults of its own, which nobody can ask about."""
    text = unit.hardening.faults
    if not text:
        return None
    return (
        Faults(text, unit.group.rank) if owner is None else owner.use_faults(text, unit.group.rank)
    )


def alarms_of(unit: Unit, owner: Runtime | None) -> Alarms | None:
    """The model's. A region without parameters has alarms of its own, which are looked at after each call."""
    text = unit.hardening.guards
    if not text:
        return None
    return Alarms(text, unit.group) if owner is None else owner.use_alarms(text, unit.group)


def _reach(unit: Unit, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the code can reach from this call's module. The unit knows the module that it was compiled for;
    of another one, what `fxpasses.runtime` has been told of.
    """
    known = unit.scope.tensors()
    if not parameters or any(known.get(name) is p for name, p in parameters.items()):
        return known
    for whole, parameter in owner_of(parameters).names().items():
        for name, p in parameters.items():
            if p is parameter and whole.endswith(name):
                prefix = whole.removesuffix(name)
                named = owner_of(parameters).names().items()
                return {n.removeprefix(prefix): t for n, t in named if n.startswith(prefix)}
    return {}
