"""What a training program asks of the backend while it runs: last step, plan, state.

A `Runtime` belongs to a set of parameters: those of one module, or those that appear together in compiled
graphs. `runtime(x)` finds it by any of them, so it works before the first forward as well.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fxpasses.config import nearest
from fxpasses.coverage import check_optimizer
from fxpasses.state import STORE

STATE_DICT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """A collective that one backward graph issues.

    Attributes:
        operator: functional collective, `"all_reduce"`.
        group: registered name of the process group.
        dtype: of the payload on the wire.
        numel: elements of the payload on each rank.
        bytes: bytes of the payload on each rank (what travels depends on the algorithm: a ring all-reduce
            sends `2 (W - 1) / W` times as many).
        parameters: whose gradients it carries; empty for control messages.
        model_line: `file:line` that the last of these gradients comes from.
    """

    operator: str
    group: str
    dtype: str
    numel: int
    bytes: int
    parameters: tuple[str, ...]
    model_line: str


@dataclasses.dataclass
class StepRecord:
    """What happened since the previous `optimizer.step()`.

    Attributes:
        backwards: backward graphs that ran.
        collectives: collectives that they issued.
        bytes: payload bytes of these on this rank.
        skipped: whether the optimizer's step was skipped (loss scaling).
    """

    backwards: int = 0
    collectives: int = 0
    bytes: int = 0
    skipped: bool = False


class Runtime:
    """State and records of the compiled training of one set of parameters."""

    def __init__(self) -> None:
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._plan: dict[int, tuple[PlannedCollective, ...]] = {}
        self._step = StepRecord()
        self._step_ended = False

    @property
    def last_step(self) -> StepRecord:
        """The step that ran last; between a backward and `optimizer.step()`, the one under way."""
        return dataclasses.replace(self._step)

    @property
    def plan(self) -> tuple[PlannedCollective, ...]:
        """The collectives of a backward in order, graph after graph as they were compiled."""
        return tuple(c for planned in self._plan.values() for c in planned)

    def state_dict(self) -> dict[str, Any]:
        """All state across steps: `{"version": 1, "state": {"kind/parameter.name": tensor}}`.

        State is per rank: save it once a rank. It does not depend on how gradients were bucketed. After
        a change of the number of ranks, load the state that each continuing rank had; new ranks start
        fresh.
        """
        state = {
            f"{kind}/{name}": tensor
            for parameter, name in self._named_parameters()
            for kind, tensor in STORE.of(parameter)
        }
        return {"version": STATE_DICT_VERSION, "state": state}

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
        parameters = {name: parameter for parameter, name in self._named_parameters()}
        unknown = [key for key in state_dict["state"] if key.partition("/")[2] not in parameters]
        if unknown:
            name = unknown[0].partition("/")[2]
            raise ValueError(
                f"state {unknown[0]!r} belongs to no parameter of this model{nearest(name, parameters)}"
            )
        for key, tensor in state_dict["state"].items():
            kind, _, name = key.partition("/")
            STORE.put(parameters[name], kind, tensor)

    def adopt(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make parameters this runtime's own, under these names."""
        for name, parameter in named_parameters:
            self._parameters[parameter] = name
            _OWNER[parameter] = self

    def record_plan(self, graph_id: int, plan: tuple[PlannedCollective, ...]) -> None:
        self._plan[graph_id] = plan

    def record_backward(self, plan: tuple[PlannedCollective, ...]) -> None:
        if self._step_ended:
            self._step, self._step_ended = StepRecord(), False
        self._step.backwards += 1
        self._step.collectives += len(plan)
        self._step.bytes += sum(c.bytes for c in plan)

    def end_step(self) -> None:
        self._step_ended = True

    def absorb(self, other: Runtime) -> None:
        """Take over what another runtime holds: its parameters turned out to belong to the same model."""
        self.adopt([(name, parameter) for parameter, name in other._named_parameters()])
        self._plan = {**other._plan, **self._plan}
        if not other._step_ended:
            self._step.backwards += other._step.backwards
            self._step.collectives += other._step.collectives
            self._step.bytes += other._step.bytes

    def _named_parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        yield from self._parameters.items()


_OWNER: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def runtime(x: Any) -> Runtime:
    """The runtime of a model.

    Args:
        x: the compiled module, the plain module under it, or a compiled function (its parameters are
            those of the modules that it is bound to or closes over).

    Raises:
        ValueError: when no parameter can be found through `x`.
    """
    named = dict(_parameters_of(x))
    if not named:
        raise ValueError(
            f"runtime({x!r}): no parameter is reachable from it; pass the module that holds them"
        )
    return owner_of(named, rename=True)


def owner_of(named: Mapping[str, torch.Tensor], rename: bool = False) -> Runtime:
    """The one runtime of these parameters; several that own some of them become one.

    Args:
        rename: let these names replace those under which a compiled graph knew the parameters.
    """
    owners: dict[int, Runtime] = {}
    orphans: list[tuple[str, torch.Tensor]] = []
    for name, parameter in named.items():
        owner = _OWNER.get(parameter)
        if owner is None:
            orphans.append((name, parameter))
        else:
            owners[id(owner)] = owner
    first, *rest = owners.values() or [Runtime()]
    for other in rest:
        first.absorb(other)
    first.adopt(named.items() if rename else orphans)
    return first


def owns(runtime: Runtime, parameter: torch.Tensor) -> bool:
    """Whether a parameter belongs to this runtime now."""
    return _OWNER.get(parameter) is runtime


def _parameters_of(x: Any) -> Iterator[tuple[str, torch.Tensor]]:
    x = inspect.unwrap(x, stop=lambda f: isinstance(f, torch.nn.Module)) if callable(x) else x
    if isinstance(x, torch.nn.Module):
        yield from getattr(x, "_orig_mod", x).named_parameters()
        return
    function = getattr(x, "_torchdynamo_orig_callable", x)
    bound = getattr(function, "__self__", None)
    if bound is not None:
        yield from _parameters_of(bound)
        return
    if not inspect.isfunction(function):
        return
    reached = inspect.getclosurevars(function)
    for name, value in {**reached.globals, **reached.nonlocals}.items():
        if isinstance(value, torch.nn.Parameter):
            yield name, value
        elif isinstance(value, torch.nn.Module):
            yield from ((f"{name}.{k}", p) for k, p in _parameters_of(value))


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled optimizer step is traced once; none of this belongs in its graph
    check_optimizer(optimizer)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for owner in {id(o): o for p in parameters if (o := _OWNER.get(p)) is not None}.values():
        owner.end_step()


register_optimizer_step_pre_hook(_before_optimizer_step)
