"""Signs of life of a group's ranks, in the group's store, and what they say about a wait that failed.

    rank 0   waits … fails ── "failed" ── calls the roll ── reads, for GRACE_S at most ── its verdict
    rank 1   waits … "waits" ───────────────── answers …
    rank 2                                                                (nothing: it is the one)

A sign stays in the store when its rank has died. So one that says "waits" counts only if it answers the
roll. One that says "failed" counts forever: so a rank learns, from a neighbour that failed and went, of a third
rank that was lost first.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from fxpasses.distributed.group import Group, process_group

GRACE_S = 3.0  # a waiting rank gives a sign after two seconds at most, and answers within another
_POLL_S = 0.25


@dataclasses.dataclass(frozen=True)
class Sign:
    """What a rank says of itself.

    Attributes:
        what: it waits in, or failed in.
        waited_s: until it said so.
        failed: whether that wait is over, with an error.
        lost: the ranks that it found missing, once it has found out.
        roll: how often the roll had been called when it said so.
    """

    what: str
    waited_s: float
    failed: bool = False
    lost: Sequence[int] = ()
    roll: int = 0


@dataclasses.dataclass(frozen=True)
class Roll:
    """What the other ranks of a group said, by rank in the group.

    Attributes:
        signs: of the ranks that gave one, even if long ago.
        silent: the ranks that did not answer.
        late: the ranks that began to wait only after the wait in question had failed.
        store_lost: whether the store went away before the roll could be called.
    """

    signs: Mapping[int, Sign]
    silent: Sequence[int]
    late: Sequence[int] = ()
    store_lost: bool = False


class Signs:
    """The signs of a group's ranks in a store."""

    def __init__(self, group: Group, store: dist.Store) -> None:
        self._store = dist.PrefixStore("fxpasses/waiting", store)
        self._rank = group.rank
        self._others = [rank for rank in range(group.size) if rank != group.rank]

    def give(self, sign: Sign | None) -> None:
        """Publish this rank's; None when it went on. (Deleting the key would race with a read.)"""
        said = None if sign is None else dataclasses.asdict(sign)
        self._store.set(str(self._rank), json.dumps(said))

    def rolls(self) -> int:
        """How often the roll has been called."""
        return int(self._store.get("rolls")) if self._store.check(["rolls"]) else 0

    def heard(self) -> Roll:
        """What the others have said so far, for the case that the store is lost before this rank fails."""
        signs = self._read(self._others)
        return Roll(signs, [r for r in self._others if r not in signs], store_lost=True)

    def call(self, sign: Sign) -> Roll:
        """Publish that this rank failed, and give the others some time to say where they are."""
        self.give(sign)
        roll = self._store.add("rolls", 1)
        called = time.monotonic()
        signs: dict[int, Sign] = {}
        late: list[int] = []
        silent = self._others
        while silent:
            since_s = time.monotonic() - called
            signs |= self._read(silent)
            answers = {r: signs[r] for r in silent if r in signs and _counts(signs[r], roll)}
            late += [r for r, answer in answers.items() if answer.waited_s < since_s - _POLL_S]
            silent = [r for r in silent if r not in answers]
            if since_s > GRACE_S:
                break
            time.sleep(_POLL_S)
        self.give(dataclasses.replace(sign, lost=silent or late))
        return Roll(signs, silent, late)

    def _read(self, ranks: Iterable[int]) -> dict[int, Sign]:
        keys = ((rank, str(rank)) for rank in ranks)
        said = {rank: json.loads(self._store.get(k)) for rank, k in keys if self._store.check([k])}
        return {rank: Sign(**sign) for rank, sign in said.items() if sign is not None}


def account(group: Group, what: str, waited_s: float, roll: Roll | None) -> str:
    """For whom this rank waited, as far as the roll tells (None: the store did not answer)."""
    waited = f"{_names(group, [group.rank])} waited {waited_s:.0f} s in {what}"
    if roll is not None and roll.silent:
        waited += f" for {_names(group, roll.silent)}, which gave no sign of life"
    elif roll is not None and roll.late:
        waited += f" for {_names(group, roll.late)}, which came too late"
    elif roll is not None and not roll.store_lost:
        waited += ", and no rank is silent"
    else:
        waited += (
            "; the store that the ranks met in does not answer, so the process that hosts it (rank 0 of the "
            "world, unless torchrun does) is likely the one lost"
        )
    states = _states(group, what, roll) if roll is not None else []
    return f"{waited} ({'; '.join(states)})" if states else waited


def _states(group: Group, what: str, roll: Roll) -> list[str]:
    """Where each rank is that gave a sign; ranks of which the same is to be said, together."""
    ranks: dict[str, list[int]] = {}
    for rank, sign in sorted(roll.signs.items()):
        place = "there too" if sign.what == what else f"in {sign.what}"
        if sign.failed:
            lost = f", for want of {_names(group, sign.lost)}" if sign.lost else ""
            state = f"failed {place} after {sign.waited_s:.0f} s{lost}"
        elif rank in roll.silent:
            state = f"last waited {place}"
        else:
            state = f"waits {place}"
        ranks.setdefault(state, []).append(rank)
    gone = ["the store is lost since"] if roll.store_lost and roll.silent else []
    return [f"{_names(group, some)} {state}" for state, some in ranks.items()] + gone


def _counts(sign: Sign, roll: int) -> bool:
    return sign.failed or sign.roll >= roll


def _names(group: Group, ranks: Sequence[int]) -> str:
    """The ranks of a group, with their ranks in the world if the group is only a part of it."""
    assert group.name is not None
    names = list(map(str, ranks))
    if group.size < dist.get_world_size():
        whole = process_group(group.name)
        names = [f"{rank} (global rank {dist.get_global_rank(whole, rank)})" for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
