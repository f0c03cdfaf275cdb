"""Compression that changes: which level each layer takes in the next backward.

    statistics of the last backward (reduced, so the same on all ranks) ─▶ choose ─▶ levels ─▶ a variant of the
    backward that was compiled for these, or is when they are first chosen

A warm-up of top-k has stages, equally long, in which the ratio falls (`Scheme.level_names`). The host counts
each parameter's backwards, once all ranks know that they send its gradient; no statistics are needed. A region
is as far as its parameter with the most, so that all of it changes at once.

Of an adaptive scheme only weights are compressed; biases, normalisations and embeddings are sent as they are.
All that a choice depends on is state of the parameters, so that a resumed run chooses as the saved one did.

Policies: `norm`, after Agarwal et al., "Accordion: adaptive gradient communication via critical learning regime
identification" (2021): little is lost while the gradients' norm changes, much while it is steady. Then, other
than there, every few backwards send what has been held back since, so that it never waits long. Two variants.
`budget`, after L-GreCo (`budget.py`): anew after 16, 32, 64, … backwards, so a few variants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import torch

from fxpasses.budget import bits, cheapest, relative_error
from fxpasses.compression import BUDGET, Levels, Rules, Scheme, option_of
from fxpasses.layers import WEIGHT
from fxpasses.passes.measure_norms import STATISTICS
from fxpasses.state import STORE

LEVEL = "level"  # state: the number of a parameter's level, by the last decision of policy `budget`
WARMUP = "warmup"  # state: the number of a parameter's backwards so far, until its warm-up is over
_FIRST_DECISION = 16

TensorOf = Callable[[str], torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of one parameter's reduced gradients: the last norm, its moving average, and how many there were."""

    norm: float = 0.0
    average: float = 0.0
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Branch:
    """What a parameter's gradient took in a backward, and why.

    Attributes:
        parameter: qualified name.
        layer: `"weight"`, `"bias"`, `"normalisation"` or `"embedding"`.
        statistics: by which the level was chosen; zeros where there are none yet.
        level: the scheme that was taken, `"none"` for one that is sent as it is.
    """

    parameter: str
    layer: str
    statistics: Statistics
    level: str


class LevelChoice:
    """The schemes of a region that have levels.

    Args:
        rules: option `compression`.
        layers: of the parameters that the region can reach, by name.
    """

    def __init__(self, rules: Rules, layers: Mapping[str, str]) -> None:
        options = {name: option_of(name, rules) for name in layers}
        self._layers = {n: layers[n] for n, option in options.items() if option.level_names}
        self._groups: dict[Scheme, list[str]] = {}
        for name, kind in self._layers.items():
            if kind == WEIGHT or options[name].warmup:
                self._groups.setdefault(options[name], []).append(name)
        self._warmups = {n: option.warmup for n, option in options.items() if option.warmup}

    def __bool__(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self._groups)

    @property
    def start(self) -> Levels:
        """The first level for all."""
        return self._levels(dict.fromkeys(self._groups, 0))

    def statistics(self, tensor_of: TensorOf) -> dict[str, Statistics]:
        """Of the parameters that have some; one transfer from the device, which waits for the last backward.

        Args:
            tensor_of: finds a parameter by name, None for one that is gone.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name in self._layers:
            parameter = tensor_of(name)
            found = None if parameter is None else dict(STORE.of(parameter)).get(STATISTICS)
            if found is not None:
                tensors[name] = found
        if not tensors:
            return {}
        rows = torch.stack(list(tensors.values())).tolist()
        return {
            name: Statistics(norm, average, int(count))
            for name, (norm, average, count) in zip(tensors, rows, strict=True)
        }

    def choose(self, known: Mapping[str, Statistics], tensor_of: TensorOf) -> Levels:
        """The levels of the backward that is about to run, by these statistics."""
        return self._levels(
            {option: self._chosen(option, known, tensor_of) for option in self._groups}
        )

    def count(self, sent: Mapping[str, torch.Tensor]) -> None:
        """Note that a backward sends the gradients of these parameters."""
        for name in sent.keys() & self._warmups.keys():
            backwards = _state(sent[name], WARMUP, 0)
            if backwards < self._warmups[name]:
                STORE.put(sent[name], WARMUP, torch.tensor(backwards + 1))

    def branches(self, levels: Levels, known: Mapping[str, Statistics]) -> tuple[Branch, ...]:
        """What each parameter takes with these levels, and the statistics that they were chosen by."""
        taken = dict(levels)
        return tuple(
            Branch(name, layer, known.get(name, Statistics()), taken.get(name, "none"))
            for name, layer in self._layers.items()
        )

    def _levels(self, chosen: Mapping[Scheme, int | list[int]]) -> Levels:
        found: dict[str, str] = {}
        for option, names in self._groups.items():
            at = chosen[option]
            each = [at] * len(names) if isinstance(at, int) else at
            found |= {n: option.level_names[i] for n, i in zip(names, each, strict=True)}
        return tuple(sorted(found.items()))

    def _chosen(
        self, option: Scheme, everything: Mapping[str, Statistics], tensor_of: TensorOf
    ) -> int | list[int]:
        names = self._groups[option]
        if option.warmup:
            return _stage(option, max(_state(tensor_of(name), WARMUP, 0) for name in names))
        known = {name: everything[name] for name in names if name in everything}
        if option.policy == BUDGET:
            return _by_budget(option, names, known, tensor_of)
        flushes = _flushes(known.values(), option.flush)
        changes = _changes(known.values(), option.threshold)
        return 0 if flushes or changes else len(option.level_names) - 1


def _stage(option: Scheme, backwards: int) -> int:
    """The number of the stage of a warm-up that is reached after so many; the last one is what it ends with."""
    last = len(option.level_names) - 1
    return min(backwards * last // option.warmup, last)


def _changes(known: Iterable[Statistics], threshold: float) -> bool:
    """Whether the norm of these together is far from its average; also where there is none."""
    known = list(known)
    norm, average = (
        math.hypot(*(getattr(s, field) for s in known)) for field in ("norm", "average")
    )
    return average == 0.0 or abs(norm - average) > threshold * average


def _flushes(known: Iterable[Statistics], every: int) -> bool:
    """Whether the next backward is one of those that send what the others have held back."""
    backwards = max((s.count for s in known), default=0)
    return every > 0 and backwards % every == every - 1


def _by_budget(
    option: Scheme, names: list[str], known: Mapping[str, Statistics], tensor_of: TensorOf
) -> list[int]:
    parameters = {name: p for name in names if (p := tensor_of(name)) is not None}
    count = max((s.count for s in known.values()), default=0)
    decides = count >= _FIRST_DECISION and count & (count - 1) == 0
    if decides:
        schemes = [option.level(level) for level in option.level_names]
        shares = {n: known[n].average ** 2 if n in known else 0.0 for n in parameters}
        costs = [[bits(s, p.shape) for s in schemes] for p in parameters.values()]
        errors = [
            [relative_error(s, p.shape) * shares[n] for s in schemes] for n, p in parameters.items()
        ]
        chosen = cheapest(costs, errors, option.budget * sum(shares.values()))
        for parameter, index in zip(parameters.values(), chosen, strict=True):
            STORE.put(parameter, LEVEL, torch.tensor(index))
    return [_state(parameters.get(name), LEVEL, 0) for name in names]


def _state(parameter: torch.Tensor | None, kind: str, default: int) -> int:
    if parameter is None:
        return default
    return int(dict(STORE.of(parameter)).get(kind, default))
