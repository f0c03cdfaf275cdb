"""Which properties a mutant of a module has to survive: those that say what the module promises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

Drawn = Callable[[int, int], None]  # how many graphs are drawn, and how many programs
Single = Callable[[], None]
_MORE = 5  # times as many graphs where one takes next to no time


def checks_of(module: str) -> tuple[Sequence[Drawn], Sequence[Single]]:
    """Properties that concern a module: those that draw what they are tried on, and those that don't."""
    from tests.testing import promises, properties

    times = _MORE if module in promises.QUICK else 1
    drawn: list[Drawn] = [
        functools.partial(_searched, search, times) for search in promises.DRAWN.get(module, ())
    ]
    drawn += [functools.partial(properties.holds, name) for name in promises.PASSES.get(module, ())]
    drawn += [functools.partial(_searched, search, 1) for search in promises.ANYWHERE]
    return drawn, [*promises.SINGLE.get(module, ()), *promises.ANYWHERE_SINGLE]


def _searched(search: Callable[[int], None], times: int, examples: int, programs: int) -> None:
    search(times * examples)
