"""One step of a bucket's exchange on all ranks, in one process and without a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxpasses.compression import Scheme
from fxpasses.effects import COLLECTIVE_NAMESPACE
from fxpasses.exchange import Exchange, exchange_of
from fxpasses.testing.world import Launch, carry_out

CPU = torch.device("cpu")

Parameters = tuple[tuple[str, tuple[int, ...]], ...]
Values = dict[str, torch.Tensor]  # by kind of state


class _Wire(TorchDispatchMode):
    """Notes the collective that is launched; of what is rounded the seeds, and whether errors are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.seeds: list[torch.Tensor | None] = []
        self.residuals: list[torch.Tensor | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._opname in ("quantise", "requantise"):
            self.residuals.append(args[1])
            self.seeds.append(args[2])
        if func.namespace != COLLECTIVE_NAMESPACE:
            return func(*args, **kwargs or {})
        payload, *rest = args
        frozen = tuple(tuple(x) if isinstance(x, list) else x for x in rest)
        self.launches.append(Launch(func._opname, payload.clone(), frozen, "launch"))
        return payload


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """One step of a bucket.

    Attributes:
        flats: [ranks, n] fp32, what the ranks had.
        olds, news: states of each rank.
        means: [ranks, n], what each rank decoded.
        launches: of each leg, by rank.
        seeds, residuals: by rank, of everything that was rounded.
    """

    scheme: Scheme
    parameters: Parameters
    exchanges: Sequence[Exchange]
    flats: torch.Tensor
    olds: Sequence[Values]
    means: torch.Tensor
    news: Sequence[Values]
    launches: Sequence[Sequence[Launch]]
    seeds: Sequence[Sequence[torch.Tensor | None]]
    residuals: Sequence[Sequence[torch.Tensor | None]]

    @property
    def world(self) -> int:
        return len(self.exchanges)

    def all(self, kind: str, states: str = "olds") -> torch.Tensor:
        """[ranks, n] fp64."""
        return torch.stack([values[kind].double() for values in getattr(self, states)])


def exchanges_of(
    scheme: Scheme, parameters: Parameters, world: int, index: int = 0
) -> list[Exchange] | None:
    """Of each rank; None for a bucket that is sent as it is."""
    found = [exchange_of(scheme, parameters, "world", world, rank, index) for rank in range(world)]
    there = [one for one in found if one is not None]
    assert len(there) in (0, world), "ranks differ in what is compressed"
    return there or None


def exchange(
    scheme: Scheme,
    parameters: Parameters,
    exchanges: Sequence[Exchange],
    flats: torch.Tensor,
    olds: Sequence[Values],
) -> Exchanged:
    """Take every rank through one step.

    Args:
        flats: [ranks, n] fp32.
        olds: states of each rank, by kind.
    """
    specs = exchanges[0].states(CPU)
    ranks = [
        _Rank(one, flat, [values[spec.kind] for spec in specs])
        for one, flat, values in zip(exchanges, flats, olds, strict=True)
    ]
    arrived = carry_out([rank.launch() for rank in ranks])
    if exchanges[0].legs == 2:
        arrived = carry_out([r.relaunch(x) for r, x in zip(ranks, arrived, strict=True)])
    ends = [rank.end(x) for rank, x in zip(ranks, arrived, strict=True)]
    kinds = [spec.kind for spec in specs]
    return Exchanged(
        scheme,
        parameters,
        exchanges,
        flats,
        olds,
        torch.stack([mean for mean, _ in ends]),
        [dict(zip(kinds, new, strict=True)) for _, new in ends],
        list(zip(*(rank.wire.launches for rank in ranks), strict=True)),
        [rank.wire.seeds for rank in ranks],
        [rank.wire.residuals for rank in ranks],
    )


class _Rank:
    def __init__(
        self, exchange: Exchange, flat: torch.Tensor, olds: Sequence[torch.Tensor]
    ) -> None:
        self.exchange, self.flat, self.olds, self.wire = exchange, flat, olds, _Wire()
        self.kept: Any = None

    def launch(self) -> Launch:
        with self.wire:
            payload, self.kept = self.exchange.encode(self.flat, self.olds)
            self.exchange.launch(payload)
        return self.wire.launches[0]

    def relaunch(self, arrived: torch.Tensor) -> Launch:
        with self.wire:
            payload, self.kept = self.exchange.recode(arrived, self.olds, self.kept)
            self.exchange.relaunch(payload)
        return self.wire.launches[1]

    def end(self, arrived: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        mean, kept = self.exchange.decode(arrived, self.olds, self.kept)
        return mean, self.exchange.news(self.flat, self.olds, kept, mean)
