"""Alarms of guards: a state that graphs write and the host reads once a step.

alarm [2] int64       how many, and the number of a place that one came from
replayed [2] int64    the same of regions that were computed again
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxpasses.config import nearest
from fxpasses.distributed.group import Group
from fxpasses.faults.history import forget
from fxpasses.faults.models import drawn
from fxpasses.graph import ALARM, REPLAYED, StateSpec, TrainingGraph
from fxpasses.guards.option import SKIP, Guards, parse_guards
from fxpasses.precision import modules_of, operator_name
from fxpasses.rewrite import Provenance, model_line, splice

_PLACES = "alarm_places"


class FaultDetected(RuntimeError):
    """A guard found a value that no correct computation made. The optimizer's step was not taken."""


def alarm_spec(device: torch.device, kind: str = ALARM) -> StateSpec:
    return StateSpec(kind, "", (2,), torch.int64, device)


def write_alarms(
    graph: TrainingGraph, made_by: str, wrong: Sequence[tuple[fx.Node, str]], kind: str = ALARM
) -> None:
    """Add alarms to the state.

    Args:
        wrong: pairs of a bool without dimensions and the place that it is about.
        kind: of the state, `REPLAYED` for regions that were computed again.
    """
    numbers = [drawn("alarm", _anywhere(place)) for _, place in wrong]
    places = {number: place for number, (_, place) in zip(numbers, wrong, strict=True)}
    graph.module.meta[_PLACES] = {**graph.module.meta.get(_PLACES, {}), **places}
    spec = alarm_spec(wrong[0][0].meta["val"].device, kind)

    def total(old: Tensor, flags: list[Tensor]) -> Tensor:
        found = torch.stack([flag.long() for flag in flags])
        of = torch.stack([flag.long() * n for flag, n in zip(flags, numbers, strict=True)]).amax()
        count, place = old[0] + found.sum(), torch.maximum(old[1], of)
        return torch.stack([count, place])

    told = splice(
        graph,
        graph.output_node,
        total,
        graph.state_so_far(spec),
        [flag for flag, _ in wrong],
        name=kind,
        provenance=Provenance(made_by, "alarm"),
    )
    graph.write_state(spec.name, told)


def _anywhere(place: str) -> str:
    """The place without folders, which ranks may have others of: its number is in the graph."""
    return re.sub(r"\([^()]*[/\\]", "(", place)


def places_of_alarms(graph: TrainingGraph) -> dict[int, str]:
    """By number, all places that the alarms of a graph can be about."""
    return graph.module.meta.get(_PLACES, {})


def place_of(node: fx.Node, kind: str) -> str:
    """How a node is named in an alarm."""
    modules = [name for name in modules_of(node) if name]
    where = f" of {modules[-1]}" if modules else ""
    line = f" ({model_line(node)})" if model_line(node) else ""
    return f"{kind}: {operator_name(node)}{where} {node.name}{line}"


@dataclasses.dataclass(frozen=True)
class Alarm:
    """What a step's guards found.

    Attributes:
        step: from 0.
        count: places that differed.
        place: one of them.
    """

    step: int
    count: int
    place: str


class Alarms:
    """The alarms of one model, in `fxpasses.runtime(model).alarms`.

    Attributes:
        guards: the option.
        group: the ranks that train together.
        events: an `Alarm` for each step that had one, the last `REMEMBERED` of them.
        forgotten: how many were dropped.
    """

    def __init__(self, text: str, group: Group) -> None:
        self.group = group
        self.guards: Guards = parse_guards(text)
        self.events: list[Alarm] = []
        self.forgotten = 0
        self._step = 0
        self._places: dict[int, str] = {}
        self._modules: frozenset[str] = frozenset()
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}

    def tensor(self, spec: StateSpec) -> Tensor:
        """The state."""
        key = (spec.kind, spec.device)
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        return self._tensors[key]

    def learn(self, places: dict[int, str], modules: frozenset[str]) -> None:
        """Take in what a graph can have alarms about, and of which modules it checks something."""
        self._places.update(places)
        self._modules |= modules

    def end_step(self) -> bool:
        """Whether the step is to be skipped; waits for the device.

        Raises:
            FaultDetected: for an alarm, unless steps are to be skipped.
            ValueError: for a region that there is not in what has been compiled.
        """
        if self._step == 0:
            self._check_regions()
        found = self.take()
        self._step += 1
        if found is None:
            return False
        self.note(found)
        if self.guards.on != SKIP:
            self._fail(found)
        return True

    def _check_regions(self) -> None:
        pattern = self.guards.region
        if pattern and not any(fnmatch.fnmatchcase(name, pattern) for name in self._modules):
            raise ValueError(
                f"option 'guards': region={pattern!r} selects no module of which something is checked"
                f"{nearest(pattern, self._modules)}"
            )

    @property
    def compares_replicas(self) -> bool:
        """Whether parameters are to be compared in front of the update that is about to happen."""
        digest = self.guards.digest
        return digest > 0 and self._step > 0 and self._step % digest == 0

    def check_now(self) -> None:
        """Where no optimizer's step follows.

        Raises:
            FaultDetected: for an alarm.
        """
        found = self.take()
        if found is not None:
            self.note(found)
            self._fail(found)

    def note(self, found: Alarm) -> None:
        """Remember an alarm."""
        self.events.append(found)
        self.forgotten += forget(self.events)

    def _fail(self, found: Alarm) -> None:
        raise FaultDetected(
            f"option 'guards': step {found.step}: {found.count} alarm(s); {found.place} does not agree "
            "with its checksum or limit. The optimizer's step was not taken"
        )

    def take(self) -> Alarm | None:
        """What has been found so far; forgets it. Remembers which regions were computed again."""
        replayed = self._read(REPLAYED)
        if replayed is not None:
            self.note(replayed)
        return self._read(ALARM)

    def _read(self, kind: str) -> Alarm | None:
        count, number = 0, 0
        for tensor in (t for (k, _), t in self._tensors.items() if k == kind):
            row = tensor.tolist()
            count, number = count + row[0], max(number, row[1])
            if row[0]:
                tensor.zero_()
        if not count:
            return None
        return Alarm(self._step, count, self._places.get(number, "a place on another rank"))
