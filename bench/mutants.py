"""Break our passes in hundreds of small ways, and count how many of these the property tests notice.

Each mutant is one change to the source of a pass, made by rule on its syntax tree or written by hand. It is
loaded in a forked child in place of the module, and only the properties of `tests/testing/properties.py` run
against it: none of the tests that somebody wrote for a case.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.abc
import importlib.util
import os
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.mutation_rules import by_rule, left_out
from bench.mutations import PATHS, Mutant, by_hand

RESULTS = Path(__file__).parent / "results" / "mutants.txt"
SURVIVED = "SURVIVED"
MOST_SURVIVE = 0.05

# Running them


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._name, self._source = PATHS[mutant.module], mutant.source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._name else None

    def exec_module(self, module: Any) -> None:
        exec(compile(self._source, f"<mutant of {self._name}>", "exec"), module.__dict__)


def _checks(module: str, examples: int, programs: int) -> list[Callable[[], None]]:
    """Properties, those that concern a module first."""
    from tests.testing import casts, clipping, readers, refusals, scaling, scheduling, statistics
    from tests.testing import properties as p

    def holds(name: str) -> Callable[[], None]:
        return lambda: p.holds(name, examples, programs)

    def searches(*found: Callable[[int], None]) -> list[Callable[[], None]]:
        return [lambda search=search: search(examples) for search in found]  # type: ignore[misc]

    synchronised = [
        p.mean_keeps_large_numbers,
        holds("gradient_sync"),
        holds("gradient_sync_at_once"),
        holds("gradient_sync_in_order"),
        holds("gradient_sync_in_order_at_once"),
        *searches(p.overlap_changes_nothing, readers.readers_of_buckets),
    ]
    compressed = [holds(name) for name in p.OWN if name.startswith("compress_")]
    own: dict[str, list[Callable[[], None]]] = {
        "bucketing": [holds("bucketing"), *searches(p.bucket_layouts, p.bucket_limits, p.layouts)],
        "gradient_sync": synchronised,
        "reduction": [
            *synchronised,
            holds("compress_int4"),
            *searches(clipping.clipping_by_bucket),
        ],
        "participation": [holds("participation"), *searches(p.layouts)],
        "running_stats": [
            holds("running_stats"),
            *searches(
                statistics.statistics_of_many_buffers, statistics.statistics_of_whole_steps
            ),
        ],
        "cast": [*casts.SINGLE, holds("cast")],
        "loss_scale": [*scaling.SINGLE, holds("loss_scale")],
        "overflow": [*scaling.SINGLE, holds("overflow"), *searches(scaling.overflow_of_buckets)],
        "clip_norm": [
            clipping.what_is_not_finite,
            holds("clip_norm"),
            *searches(clipping.clipping_by_bucket, clipping.as_torch_clips),
        ],
        **dict.fromkeys(("compress", "exchange", "codecs", "feedback"), compressed),
        "powersgd": [holds("compress_powersgd"), holds("compress_powersgd_forgetful")],
        "rewrite": [
            p.splice_refuses_tensors, p.splice_takes_branches,
            p.splice_takes_numbers, p.splice_tells_arguments_apart, p.model_lines,
            *searches(p.splice_inlines), holds("bucketing"),
        ],
        "schedule": searches(scheduling.schedules),
        "tasks": [*scheduling.SINGLE, *searches(scheduling.tasks_as_promised)],
        "solve": [lambda: scheduling.solutions(5 * examples)],
        "variants": [p.layout_of_a_variant, *searches(p.variants_as_promised)],
    }  # fmt: skip
    return [*searches(refusals.wrong_options), *refusals.SINGLE, *own[module]]


def _try(mutant: Mutant, examples: int) -> str:
    """In the child: why the mutant is found out, or an empty text."""
    sys.meta_path.insert(0, _Instead(mutant))
    try:
        from fxpasses.testing import check

        check.PHASES = [p for p in check.PHASES if p.name in ("explicit", "generate")]
        for count, programs in ((8, 0), (examples, 1)):
            for run in _checks(mutant.module, count, programs):
                run()
    except BaseException as error:
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:160]}"
    return ""


@dataclasses.dataclass
class _Child:
    mutant: Mutant
    pid: int
    pipe: int
    deadline: float


def _start(mutant: Mutant, examples: int, timeout: float) -> _Child:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        why = "no reason"
        try:
            why = _try(mutant, examples)
        finally:
            os.write(writing, (why or SURVIVED).encode())
            os._exit(0)
    os.close(writing)
    return _Child(mutant, pid, reading, time.monotonic() + timeout)


def _finish(child: _Child) -> str:
    """What a child found, or that it took too long or died; which counts as found out."""
    late = time.monotonic() > child.deadline
    text = "" if late else os.read(child.pipe, 4096).decode()
    if late:
        os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(child.pipe)
    return "takes too long" if late else text or "the process died"


def run_all(
    mutants: list[Mutant], jobs: int, examples: int, timeout: float
) -> Iterator[tuple[Mutant, str]]:
    """(mutant, what was found) as they end."""
    waiting, running = list(mutants)[::-1], list[_Child]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(), examples, timeout))
        ready, _, _ = select.select([child.pipe for child in running], [], [], 1.0)
        for child in list(running):
            if child.pipe in ready or time.monotonic() > child.deadline:
                running.remove(child)
                yield child.mutant, _finish(child)


def _import_what_is_slow() -> None:
    """What every child needs and no mutant changes, once, before the first fork."""
    import functorch.compile
    import hypothesis
    import torch
    import torch._dynamo
    import torch.distributed
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.set_num_threads(1)
    with FakeTensorMode():
        make_fx(lambda x: torch.cat([x, x]) * 2)(torch.empty(2))
    assert functorch.compile and hypothesis
    assert not any(name.startswith("fxpasses") for name in sys.modules)


# The report


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a module's mutants.

    Attributes:
        found: (mutant, why it is found out) of those that were run.
        equivalent: those that were not, since nothing can tell them from the original.
        left_out: how many the rules don't make, by the reason.
    """

    module: str
    found: list[tuple[Mutant, str]]
    equivalent: list[Mutant]
    left_out: Counter[str]

    @property
    def survivors(self) -> list[Mutant]:
        return [mutant for mutant, why in self.found if why == SURVIVED]


def run_module(module: str, options: argparse.Namespace) -> Outcome:
    mutants = [m for m in _mutants(module, options) if m.reason is None]
    equivalent = [m for m in _mutants(module, options) if m.reason is not None]
    outcome = Outcome(module, [], equivalent, left_out(module))
    for mutant, why in run_all(mutants, options.jobs, options.examples, options.timeout):
        outcome.found.append((mutant, why))
        print(f"{'survived' if why == SURVIVED else 'killed  '} {mutant.name}", flush=True)
        if why != SURVIVED:
            print(f"             {why}", flush=True)
    return outcome


def _mutants(module: str, options: argparse.Namespace) -> list[Mutant]:
    ruled = list(by_rule(module))[:: options.every]
    return [m for m in (*by_hand(module), *ruled) if re.search(options.only, m.name)]


def report(outcomes: list[Outcome], options: argparse.Namespace) -> str:
    """Tables of what was killed, survived, could not be told, and was not made."""
    import torch

    lines = [
        f"{datetime.date.today()}, torch {torch.__version__}, {options.examples} examples a property, "
        f"{options.timeout:g} s a mutant",
        "",
        f"{'module':16}{'mutants':>8}{'killed':>8}{'survived':>10}{'':>9}{'equivalent':>12}{'not made':>10}",
    ]
    lines += [_row(outcome.module, [outcome]) for outcome in outcomes]
    lines += [_row("all", outcomes), "", "Survived:"]
    lines += [f"  {m.name}" for outcome in outcomes for m in outcome.survivors] or ["  none"]
    lines += ["", "Equivalent, and so not run:"]
    for mutant in (m for outcome in outcomes for m in outcome.equivalent):
        lines += [f"  {mutant.name}", f"      {mutant.reason}"]
    lines += ["", "Changes that the rules could make and don't:"]
    counted = sum((outcome.left_out for outcome in outcomes), Counter[str]())
    lines += [f"{count:6}  {reason}" for reason, count in counted.most_common()]
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, outcomes: list[Outcome]) -> str:
    tried = sum(len(outcome.found) for outcome in outcomes)
    alive = sum(len(outcome.survivors) for outcome in outcomes)
    equivalent = sum(len(outcome.equivalent) for outcome in outcomes)
    missing = sum(outcome.left_out.total() for outcome in outcomes)
    percent = f"{100 * (tried - alive) / max(tried, 1):.1f} %"
    return f"{name:16}{tried:8}{tried - alive:8}{alive:10}{percent:>9}{equivalent:12}{missing:10}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", default=",".join(PATHS), help="which, separated by commas")
    parser.add_argument("--only", default="", help="mutants in whose name this pattern is found")
    parser.add_argument("--examples", type=int, default=60, help="drawn graphs for each property")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--every", type=int, default=1, help="one of so many of those made by rule")
    parser.add_argument("--list", action="store_true", help="print their names and stop")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    modules = options.modules.split(",")
    if options.list:
        print("\n".join(m.name for module in modules for m in _mutants(module, options)))
        return 0
    _import_what_is_slow()
    outcomes: list[Outcome] = []
    for module in modules:
        outcomes.append(run_module(module, options))
        if options.keep:  # after each module: all of them take hours
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(report(outcomes, options) + "\n")
    print("\n" + report(outcomes, options))
    survived = sum(len(outcome.survivors) for outcome in outcomes)
    return 0 if survived <= MOST_SURVIVE * sum(len(o.found) for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
