"""Mutants of our passes that somebody thought of, and those by rule that change nothing: one file a module.

WRITTEN      (name, what stands in the source, what stands there instead)
EQUIVALENT   name of a mutant, without its line → why no graph or run can tell it from the original
KNOWN        the same → why it survives although it changes something (where there is such a one)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from bench.mutations import (
    agree_alarms,
    bucketing,
    cast,
    check_gradients,
    check_payloads,
    check_products,
    check_sums,
    check_values,
    clip_norm,
    codecs,
    compress,
    exact,
    exchange,
    feedback,
    finite,
    gradient_sync,
    inject,
    injecting,
    loss_scale,
    measure_norms,
    order,
    overflow,
    participation,
    powersgd,
    products,
    reduction,
    replay,
    rewrite,
    running_stats,
    schedule,
    settle_checks,
    solve,
    sums,
    tasks,
    variants,
)

ROOT = Path(__file__).parent.parent.parent
# What is mutated, by the module in fxpasses, in the order of reports.
MODULES: dict[str, ModuleType] = {
    "passes.bucketing": bucketing,
    "passes.gradient_sync": gradient_sync,
    "reduction": reduction,
    "passes.participation": participation,
    "passes.running_stats": running_stats,
    "passes.cast": cast,
    "passes.loss_scale": loss_scale,
    "passes.overflow": overflow,
    "passes.clip_norm": clip_norm,
    "passes.compress": compress,
    "exchange": exchange,
    "codecs": codecs,
    "feedback": feedback,
    "powersgd": powersgd,
    "passes.measure_norms": measure_norms,
    "finite": finite,
    "passes.check_values": check_values,
    "passes.check_gradients": check_gradients,
    "passes.settle_checks": settle_checks,
    "passes.check_payloads": check_payloads,
    "passes.check_products": check_products,
    "passes.check_sums": check_sums,
    "guards.products": products,
    "guards.sums": sums,
    "passes.agree_alarms": agree_alarms,
    "passes.replay": replay,
    "passes.inject": inject,
    "faults.injecting": injecting,
    "rewrite": rewrite,
    "variants": variants,
    "passes.schedule": schedule,
    "schedule.tasks": tasks,
    "schedule.solve": solve,
    "schedule.exact": exact,
    "schedule.order": order,
}
PATHS = {path.rpartition(".")[2]: f"fxpasses.{path}" for path in MODULES}
_SAID = {path.rpartition(".")[2]: said for path, said in MODULES.items()}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A changed source.

    Attributes:
        module: one of `PATHS`.
        name: the module, the line, and what is changed there.
        source: all of the module.
    """

    module: str
    name: str
    source: str

    @property
    def reason(self) -> str | None:
        """Why no test can tell it from the original, if that is known."""
        return _SAID[self.module].EQUIVALENT.get(self._what)

    @property
    def known(self) -> str | None:
        """Why it survives, if that is known."""
        return getattr(_SAID[self.module], "KNOWN", {}).get(self._what)

    @property
    def _what(self) -> str:
        """What is changed, whatever the line that it stands in."""
        return re.sub(r"^:\d+", "", self.name.removeprefix(self.module)).strip()


def file_of(module: str) -> Path:
    return ROOT / (PATHS[module].replace(".", "/") + ".py")


def source_of(module: str) -> str:
    return file_of(module).read_text()


def by_hand(module: str) -> Iterator[Mutant]:
    """The changes that somebody thought of.

    Raises:
        ValueError: for one whose place is not found once in the source.
    """
    source = source_of(module)
    for name, old, new in _SAID[module].WRITTEN:
        if source.count(old) != 1:
            times = source.count(old)
            raise ValueError(f"mutant {name!r}: {old!r} stands {times} times in {module}")
        yield Mutant(module, f"{module} by hand: {name}", source.replace(old, new))


def reasons(module: str) -> dict[str, str]:
    return {**_SAID[module].EQUIVALENT, **getattr(_SAID[module], "KNOWN", {})}
