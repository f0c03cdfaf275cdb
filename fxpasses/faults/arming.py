"""Which faults are armed in this step, and what they did.

    option ─▶ faults ─┐
    step, rank ───────┼▶ rows of a table (state) ─▶ graph ─▶ news (state) ─▶ events
    sites of a graph ─┘

What is drawn (the site among those that match, element, bits) is a hash of seed, fault and step, so that it is
the same on every run and after a resume. A fault strikes once a step in each graph that has a site for it: a
graph that runs again in the same step (a micro-batch, a region that is recomputed) finds it gone. Stuck bits
stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from fxpasses.config import nearest
from fxpasses.faults import models
from fxpasses.faults.history import forget
from fxpasses.faults.models import AFTER, AT, BEFORE, HITS, NEWS, ROW, drawn, row_of, value_of
from fxpasses.faults.sites import Places, Site, check, matching, update_site
from fxpasses.faults.spec import UPDATE, Fault, parse_faults
from fxpasses.faults.updates import Unannounced
from fxpasses.graph import FAULT_NEWS, FAULT_TABLE, StateSpec


@dataclasses.dataclass(frozen=True)
class Event:
    """A fault that happened.

    Attributes:
        fault: which one.
        site: where.
        rank, step: on which rank, in which step (from 0).
        elements: how many elements were hit; the others describe the first.
        index: in the flattened tensor; None where no value was touched (delay, stale).
        bits_before, bits_after: the element's, as unsigned numbers.
    """

    fault: Fault
    site: Site
    rank: int
    step: int
    elements: int
    index: int | None
    bits_before: int
    bits_after: int

    @property
    def before(self) -> float:
        return value_of(self.bits_before, self.site.dtype)

    @property
    def after(self) -> float:
        return value_of(self.bits_after, self.site.dtype)

    @property
    def bit(self) -> int | None:
        """The highest bit that differs; None if none does."""
        different = self.bits_before ^ self.bits_after
        return different.bit_length() - 1 if different else None

    def __str__(self) -> str:
        where = f"{self.fault.model} at {self.site}, rank {self.rank}, step {self.step}"
        if self.index is not None:
            bit = "no bit" if self.bit is None else f"bit {self.bit}"
            where += f": index {self.index}, {bit}, {self.before:g} became {self.after:g}"
        return where + (f" ({self.site.model_line})" if self.site.model_line else "")


@dataclasses.dataclass
class _Armed:
    """What was armed in one run of a graph: by number of the fault, its site; and where the news will be."""

    sites: dict[int, Site]
    news: torch.Tensor
    step: int


@dataclasses.dataclass(frozen=True)
class _Strike:
    fault: Fault
    site: Site
    draw: int


class Faults:
    """The faults of one model on this rank, in `fxpasses.runtime(model).faults`.

    Attributes:
        faults: those of the option, in order.
        rank: this rank.
        step: the step under way, from 0; a step ends at `optimizer.step()`.
        forgotten: how many events were dropped, the oldest first: `REMEMBERED` are kept.
    """

    def __init__(self, text: str, rank: int) -> None:
        self.faults = parse_faults(text)
        self.rank = rank
        self.step = 0
        self.forgotten = 0
        self._sites: dict[int, Site] = {}  # all that are known, by number
        self._learned: dict[int, Places] = {}  # those of graphs, by identity
        self._by_hand: dict[int, _Strike] = {}
        self._names: set[tuple[str, str]] = set()  # (phase, name) of all that could be selected
        self._zeros: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._struck: set[tuple[Hashable, int]] = set()  # (graph, fault) in this step
        self._pending: list[_Armed] = []
        self._events: list[Event] = []
        self._fired: set[int] = set()  # faults, by number, that happened at some time
        self._checked = False
        self._unannounced = Unannounced() if self.has(UPDATE) else None  # until a step has ended

    @property
    def sites(self) -> tuple[Site, ...]:
        """All places that compiled graphs have for these faults, so far."""
        return tuple(self._sites.values())

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened so far, the last `REMEMBERED` of it; waits for the device."""
        self._collect()
        return tuple(self._events)

    def clear(self) -> None:
        """Forget the events."""
        self._collect()
        self._events.clear()

    def strike(
        self,
        site: Site,
        *,
        fault: int = 0,
        index: int | None = None,
        bit: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> None:
        """Arm a fault by hand: it strikes once, when the site's graph runs next. No graph is compiled for it.

        Args:
            fault: number of the option's fault.
            index, bit: instead of what that says.
            seed: of what is drawn.

        Raises:
            ValueError: for a fault that can't happen there.
        """
        if fault not in self._sites[site.number].faults:
            raise ValueError(f"fault {fault} ({self.faults[fault].text}) does not happen at {site}")
        changes: dict[str, Any] = {"index": index} if index is not None else {}
        changes |= {"bit": bit} if bit is not None else {}
        given = dataclasses.replace(self.faults[fault], **changes)
        check(given, site)
        self._by_hand[fault] = _Strike(given, site, drawn(seed, "by hand"))

    def disarm(self) -> None:
        """Take back what was armed by hand and did not strike."""
        self._by_hand.clear()

    def states(
        self, graph: Hashable, specs: Sequence[StateSpec], places: Places
    ) -> dict[str, torch.Tensor]:
        """The table and the news, by the names of their specs, as a graph is about to read and write them.

        Args:
            graph: identity of the code and its tensors.
            specs: its states, of whatever kind.
            places: that it has.
        """
        if id(places) not in self._learned:  # this stands in front of each run of a graph
            self._learned[id(places)] = places
            self._learn(places)
        own = [spec for spec in specs if spec.kind in (FAULT_TABLE, FAULT_NEWS)]
        strikes = self._due(graph, places, self.step) if own else {}
        if not strikes:
            return {spec.name: self._nothing(spec) for spec in own}
        # Tensors of their own: a backward may yet read those of the step before.
        table = torch.tensor(self._rows(strikes), device=own[0].device)
        news = torch.zeros(own[1].shape, dtype=own[1].dtype, device=own[1].device)
        sites = {number: strike.site for number, strike in strikes.items()}
        self._pending.append(_Armed(sites, news, self.step))
        return {own[0].name: table, own[1].name: news}

    def _learn(self, places: Places) -> None:
        self._names |= places.names
        for site in places.sites:
            self._sites.setdefault(site.number, site)

    def _nothing(self, spec: StateSpec) -> torch.Tensor:
        """What no fault is armed in, and no graph changes."""
        key = (spec.name, spec.device)
        if key not in self._zeros:
            self._zeros[key] = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        return self._zeros[key]

    def update(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Strike parameters that an optimizer has just updated."""
        sites = [
            dataclasses.replace(site, faults=numbers)
            for name, p in parameters.items()
            if p.dtype in models.FORMS
            and (numbers := matching(site := update_site(name, p), self.faults))
        ]
        places = Places(tuple(sites), frozenset((UPDATE, name) for name in parameters))
        self._learn(places)
        for number, fault in enumerate(self.faults):
            if fault.phase == UPDATE and number not in places.by_fault:
                raise ValueError(self._unmatched(fault))
        step = self.step - 1  # an update comes when its step has ended
        for number, strike in self._due(UPDATE, places, step).items():
            parameter = parameters[strike.site.name]
            row = torch.tensor(self._row(strike), device=parameter.device)
            struck, news = models.strike(parameter.detach(), row, strike.fault, strike.site.number)
            with torch.no_grad():
                parameter.copy_(struck)
            rows = torch.zeros(len(self.faults), NEWS, dtype=torch.int64)
            rows[number] = news
            self._pending.append(_Armed({number: strike.site}, rows, step))

    def before_forward(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Called in front of a forward that records a backward.

        Raises:
            ValueError: for an update that faults of phase `update` could not strike.
        """
        if self._unannounced is not None:
            self._unannounced.check(parameters)

    def after_backward(self, parameters: Mapping[str, torch.Tensor]) -> None:
        if self._unannounced is not None:
            self._unannounced.note(parameters)

    def has(self, phase: str) -> bool:
        return any(fault.phase == phase for fault in self.faults)

    def end_step(self) -> None:
        """Called when a step ends.

        Raises:
            ValueError: at the first one, for a fault for which there is no site in all that has been compiled.
        """
        self._collect()
        if not self._checked:
            self._checked = True
            for fault, message in self.unmatched().items():
                if fault.phase != UPDATE:  # an optimizer says so itself
                    raise ValueError(message)
        self._struck.clear()
        self._unannounced = None
        self.step += 1

    def missed(self) -> tuple[Fault, ...]:
        """The faults of this rank whose first step has passed, and that have never happened."""
        self._collect()
        return tuple(
            fault
            for number, fault in enumerate(self.faults)
            if self._is_mine(fault)
            and fault.is_active(fault.first)
            and fault.first < self.step
            and number not in self._fired
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])

    def _due(self, graph: Hashable, places: Places, step: int) -> dict[int, _Strike]:
        """By number, the faults that strike when this graph runs now."""
        found: dict[int, _Strike] = {}
        for number, candidates in places.by_fault.items():
            fault, given = self.faults[number], self._by_hand.get(number)
            if given is not None and given.site.number in places.by_number:
                found[number] = self._by_hand.pop(number)
            elif self._is_mine(fault) and fault.is_active(step):
                if (graph, number) in self._struck and fault.model != "stuck":
                    continue
                self._struck.add((graph, number))
                # What is stuck is so at the same place in each step.
                draw = drawn(fault.seed, number, fault.first if fault.model == "stuck" else step)
                site = candidates[drawn(draw, "site") % len(candidates)]
                found[number] = _Strike(fault, site, draw)
        return found

    def _is_mine(self, fault: Fault) -> bool:
        return fault.rank is None or fault.rank == self.rank

    def _rows(self, strikes: Mapping[int, _Strike]) -> list[list[int]]:
        nothing = [0] * ROW
        return [
            self._row(strikes[number]) if number in strikes else nothing
            for number in range(len(self.faults))
        ]

    def _row(self, strike: _Strike) -> list[int]:
        return row_of(strike.fault, strike.site.number, strike.site.dtype, strike.draw)

    def _collect(self) -> None:
        """Read the news of graphs that have run; what has not run yet (a backward to come) stays."""
        waiting: list[_Armed] = []
        for armed in self._pending:
            rows = armed.news.tolist()
            for number in [n for n in armed.sites if rows[n][HITS]]:
                self._fired.add(number)
                self._events.append(
                    self._event(number, armed.sites.pop(number), rows[number], armed)
                )
            if armed.sites:
                waiting.append(armed)
        self._pending = [armed for armed in waiting if armed.step >= self.step]
        self.forgotten += forget(self._events)

    def _event(self, number: int, site: Site, news: list[int], armed: _Armed) -> Event:
        fault = self.faults[number]
        mask = (1 << models.FORMS[site.dtype].width) - 1
        touched = fault.model not in ("stale", "delay", "missing", "exit")
        return Event(
            fault=fault,
            site=site,
            rank=self.rank,
            step=armed.step,
            elements=news[HITS],
            index=news[AT] if touched else None,
            bits_before=news[BEFORE] & mask,
            bits_after=news[AFTER] & mask,
        )

    def unmatched(self) -> dict[Fault, str]:
        """The faults for which there is no site in what has been compiled, and what there is."""
        matched = {number for site in self.sites for number in site.faults}
        return {f: self._unmatched(f) for i, f in enumerate(self.faults) if i not in matched}

    def _unmatched(self, fault: Fault) -> str:
        names = {name for phase, name in self._names if phase == fault.phase}
        instead = nearest(fault.pattern, names) if names else "; there is no site of this phase"
        return f"option 'faults': {fault.text!r} selects nothing in what has been compiled{instead}"
