"""One rank's value, damaged on its way to those that read it, and what alarms say of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from custom_ops.bits import words
from fxpasses.graph import ALARM, REPLAYED
from fxpasses.guards.alarms import places_of_alarms
from fxpasses.testing.oracles import Run
from fxpasses.testing.oracles.base import trace

# What a value becomes, by the values of others; None where it stays.
Damage = Callable[..., Tensor | None]


def silent(run: Run) -> None:
    """No guard raises an alarm, or computes again, where nothing went wrong."""
    for rank, row in enumerate(run.traced_after.results):
        for at, _, role in run.after.outputs("state"):
            if role.name in (f"{ALARM}/", f"{REPLAYED}/"):
                assert not row[at].any(), f"{role.name} of rank {rank}: {row[at].tolist()}"


def struck(
    run: Run,
    node: fx.Node,
    readers: Sequence[fx.Node],
    damage: Damage,
    by: Sequence[fx.Node] = (),
) -> list[list[int]] | None:
    """By rank, the alarms after one rank's value has been damaged on its way to some of its readers; None if it
    has not.

    Args:
        node, readers, by: of rank 0's graph; others have the same names.
        by: whose values `damage` is called with as well.
    """
    spoiled = run.seed % run.world
    graphs = list(run.afters)
    graphs[spoiled] = graphs[spoiled].copy()
    graph = graphs[spoiled].graph
    named = {n.name: n for n in graph.nodes}
    changed = [n for n in graph.nodes if n.name in {reader.name for reader in readers}]
    damaged: list[Tensor] = []

    def damaged_or_not(value: Tensor, *others: Any) -> Tensor:
        found = damage(value, *others)
        damaged.extend([] if found is None else [found])
        return value if found is None else found

    with graph.inserting_before(changed[0]):
        other = graph.call_function(damaged_or_not, tuple(named[n.name] for n in (node, *by)))
    for reader in changed:
        reader.replace_input_with(named[node.name], other)
    results = trace(graphs, run.seed).results
    return alarms_of(run, results) if damaged else None


def alarms_of(run: Run, results: Sequence[Sequence[Any]] | None = None) -> list[list[int]]:
    """By rank, how many and the number of a place."""
    results = run.traced_after.results if results is None else results
    at = [i for i, _, role in run.after.outputs("state") if role.name == f"{ALARM}/"]
    return [row[at[0]].tolist() if at else [0, 0] for row in results]


def told_by(run: Run, found: list[list[int]] | None, ranks: set[int], place: str) -> None:
    """These ranks have one alarm, about this place, and the others none; if anything was struck."""
    if found is None:
        return
    counts = [count for count, _ in found]
    assert counts == [int(rank in ranks) for rank in range(run.world)], f"{place}: {counts}"
    for rank in ranks:
        assert places_of_alarms(run.after)[found[rank][1]].startswith(place)


def copied(value: Tensor) -> Tensor | None:
    """In the same layout; None where elements share their memory."""
    if any(t == 0 and s > 1 for s, t in zip(value.shape, value.stride(), strict=True)):
        return None
    memory = value.new_empty(0).set_(value.untyped_storage().clone())
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def place_in(seed: int, value: Tensor) -> tuple[Tensor, ...]:
    return torch.unravel_index(torch.tensor(seed % value.numel()), value.shape)


def bit_flip(seed: int) -> Damage:
    """One bit of one element."""

    def flip(value: Tensor) -> Tensor | None:
        other = copied(value)
        if other is not None:
            parts = words(other)
            bit = seed // parts.numel() % (8 * parts.element_size())
            is_sign = bit == 8 * parts.element_size() - 1
            parts[place_in(seed, parts)] ^= -(1 << bit) if is_sign else 1 << bit
        return other

    return flip


def increase(seed: int, much: float) -> Damage:
    """To one element."""

    def add(value: Tensor) -> Tensor | None:
        other = copied(value)
        if other is not None:
            other[place_in(seed, value)] += much
        return other

    return add
