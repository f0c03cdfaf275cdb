"""Break our passes in hundreds of small ways, and count how many of these the property tests notice.

Each mutant is one change to the source of a pass, made by rule on its syntax tree or written by hand. It is
loaded in a forked child in place of the module, and only the properties of `tests/testing` run against it: none
of the tests that somebody wrote for a case. The module as it is has to pass them first; a mutant may take a few
times as long.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import gc
import importlib
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import re
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench import RESULTS
from bench.imports import untouched
from bench.mutation_rules import by_rule, left_out
from bench.mutations import PATHS, Mutant, by_hand, source_of

TABLE = RESULTS / "mutants.txt"
RECORDS = TABLE.with_suffix(".json")
SURVIVED = "SURVIVED"
MOST_SURVIVE = 0.05
_FEW = 8  # examples that find most mutants
_AS_LONG, _AT_LEAST_S = 3, 5  # times that what the original takes, and more

# Running them


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._name, self._source = PATHS[mutant.module], mutant.source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._name else None

    def exec_module(self, module: Any) -> None:
        exec(compile(self._source, f"<mutant of {self._name}>", "exec"), module.__dict__)


Drawn = Callable[[int, int], None]  # how many graphs are drawn, and how many programs
Single = Callable[[], None]


def _checks(module: str) -> tuple[Sequence[Drawn], Sequence[Single]]:
    """Properties that concern a module: those that draw what they are tried on, and those that don't."""
    from tests.testing import (
        cast_graphs,
        clipping,
        ordering,
        readers,
        refusals,
        scaling,
        scheduling,
        solving,
        statistics,
        tasks,
        variants,
    )
    from tests.testing import properties as p

    def holds(*names: str) -> list[Drawn]:
        return [functools.partial(p.holds, name) for name in names]

    def searches(*found: Callable[[int], None]) -> list[Drawn]:
        return [lambda examples, _, search=search: search(examples) for search in found]  # type: ignore[misc]

    def often(*found: Callable[[int], None]) -> list[Drawn]:
        return [lambda examples, _, search=search: search(5 * examples) for search in found]  # type: ignore[misc]

    synchronised = [
        *holds(
            "gradient_sync",
            "gradient_sync_at_once",
            "gradient_sync_in_order",
            "gradient_sync_in_order_at_once",
        ),
        *searches(p.overlap_changes_nothing, readers.readers_of_buckets),
    ]
    compressed = holds(*(name for name in p.OWN if name.startswith("compress_")))
    clipped = searches(clipping.clipping_by_bucket)
    drawn: dict[str, list[Drawn]] = {
        "bucketing": [
            *holds("bucketing"),
            *searches(p.bucket_layouts, p.bucket_limits, p.layouts),
        ],
        "gradient_sync": synchronised,
        "reduction": [*synchronised, *holds("compress_int4"), *clipped],
        "participation": [*holds("participation"), *searches(p.layouts)],
        "running_stats": [
            *holds("running_stats"),
            *searches(statistics.statistics_of_many_buffers, statistics.statistics_of_whole_steps),
        ],
        "cast": [*holds("cast"), *searches(cast_graphs.marked_operators)],
        "loss_scale": holds("loss_scale"),
        "overflow": [*holds("overflow"), *searches(scaling.overflow_of_buckets)],
        "clip_norm": [*holds("clip_norm"), *clipped, *searches(clipping.as_torch_clips)],
        **dict.fromkeys(("compress", "exchange", "codecs", "feedback"), compressed),
        "powersgd": holds("compress_powersgd", "compress_powersgd_forgetful"),
        "rewrite": [*searches(p.splice_inlines), *holds("bucketing")],
        "schedule": searches(scheduling.schedules),
        "tasks": often(tasks.tasks_as_promised),
        "solve": often(
            solving.solutions,
            solving.bounds_as_promised,
            solving.lists_as_promised,
            solving.memory_is_spared,
            solving.moves_as_promised,
            solving.postponed_as_promised,
            solving.swaps_as_promised,
            solving.searches_in_bounds,
        ),
        "exact": often(solving.all_orders),
        "order": [
            *often(ordering.order_as_promised, ordering.links_as_promised),
            *searches(ordering.events_as_promised),
        ],
        "variants": searches(variants.variants_as_promised, variants.buffers_of_others),
    }
    single: dict[str, Sequence[Single]] = {
        **dict.fromkeys(("gradient_sync", "reduction"), (p.mean_keeps_large_numbers,)),
        "cast": cast_graphs.SINGLE,
        **dict.fromkeys(("loss_scale", "overflow"), scaling.SINGLE),
        "clip_norm": [clipping.what_is_not_finite],
        "rewrite": [
            p.splice_refuses_tensors, p.splice_takes_branches,
            p.splice_takes_numbers, p.splice_tells_arguments_apart, p.model_lines,
        ],
        "tasks": tasks.SINGLE,
        "solve": [solving.search_finds_the_best, solving.search_comes_close],
        "exact": [solving.all_orders_are_few],
        "order": ordering.SINGLE,
        "variants": [variants.layout_of_a_variant],
    }  # fmt: skip
    return [*drawn[module], *searches(refusals.wrong_options)], [
        *single.get(module, ()),
        *refusals.SINGLE,
    ]


def _try(mutant: Mutant, examples: int) -> str:
    """In the child: why the mutant is found out, or an empty text."""
    sys.meta_path.insert(0, _Instead(mutant))
    try:
        from fxpasses.testing import check

        check.PHASES = [p for p in check.PHASES if p.name in ("explicit", "generate")]
        drawn, single = _checks(mutant.module)
        few, many = (
            [functools.partial(run, count, programs) for run in drawn]
            for count, programs in ((_FEW, 0), (examples, 1))
        )
        for run in (*few, *single, *many):
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


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of a mutant: why it was found out, or `SURVIVED`, and how much processor time that took."""

    mutant: Mutant
    why: str
    seconds: float


def _start(mutant: Mutant, examples: int, timeout: float, seconds: int) -> _Child:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))
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


def _finish(child: _Child) -> Found:
    """What a child found, or that it took too long or died; which counts as found out."""
    late = time.monotonic() > child.deadline
    text = "" if late else os.read(child.pipe, 4096).decode()
    if late:
        os.kill(child.pid, signal.SIGKILL)
    _, status, used = os.wait4(child.pid, 0)
    os.close(child.pipe)
    late = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    why = "takes too long" if late else text or "the process died"
    return Found(child.mutant, why, used.ru_utime + used.ru_stime)


def run_all(
    mutants: Sequence[Mutant], jobs: int, examples: int, timeout: float, seconds: float
) -> Iterator[Found]:
    """Try mutants, several at a time.

    Args:
        examples: to draw for each property.
        timeout: seconds for a mutant, by the clock.
        seconds: of processor time for a mutant.

    Returns:
        What became of them, as they end.
    """
    waiting, running = list(mutants)[::-1], list[_Child]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(), examples, timeout, int(seconds) + 1))
        ready, _, _ = select.select([child.pipe for child in running], [], [], 1.0)
        for child in list(running):
            if child.pipe in ready or time.monotonic() > child.deadline:
                running.remove(child)
                yield _finish(child)


def _seconds_of(module: str, options: argparse.Namespace) -> float:
    """Processor time that the module takes as it is.

    Raises:
        RuntimeError: if it does not pass: then no mutant is found out by what it changes.
    """
    original = Mutant(module, f"{module} as it is", source_of(module))
    (found,) = run_all([original], 1, options.examples, options.timeout, options.timeout)
    if found.why != SURVIVED:
        raise RuntimeError(f"the properties do not hold of {found.mutant.name}: {found.why}")
    return found.seconds


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


def _import_what_stays(module: str) -> None:
    """Our own modules that do not import the one that will be changed."""
    for name in untouched(PATHS[module], ("tests.testing.", "fxpasses.passes.")):
        importlib.import_module(name)
    assert PATHS[module] not in sys.modules
    gc.freeze()  # so that children share it


# The report


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a module's mutants.

    Attributes:
        module: one of `PATHS`.
        date, torch: when this was found, and with which version.
        examples: drawn for each property.
        every: one of so many of the mutants made by rule was tried; all of those by hand were.
        tried: how many that were.
        survived: names of those that did, with the reason where it is known.
        equivalent: names of those that were not tried, since nothing can tell them from the original, with the
            reason.
        left_out: how many the rules don't make, by the reason.
    """

    module: str
    date: str
    torch: str
    examples: int
    every: int
    tried: int
    survived: dict[str, str]
    equivalent: dict[str, str]
    left_out: dict[str, int]


def run_module(module: str, options: argparse.Namespace) -> Outcome:
    """Try the mutants of a module; in a process of its own, since it loads what mutants of others change."""
    import torch

    _import_what_stays(module)
    mutants = _mutants(module, options)
    seconds = _seconds_of(module, options)
    print(f"{module} as it is takes {seconds:.1f} s", flush=True)
    limit = _AS_LONG * seconds + _AT_LEAST_S
    tried = [mutant for mutant in mutants if mutant.reason is None]
    survived: dict[str, str] = {}
    for found in run_all(tried, options.jobs, options.examples, options.timeout, limit):
        if found.why == SURVIVED:
            survived[found.mutant.name] = found.mutant.known or "not known"
        word = "survived" if found.why == SURVIVED else "killed  "
        print(f"{word} {found.seconds:6.1f} s  {found.mutant.name}", flush=True)
        if found.why != SURVIVED:
            print(f"                   {found.why}", flush=True)
    _seconds_of(module, options)  # what it was tried by has not been changed meanwhile
    return Outcome(
        module,
        str(datetime.date.today()),
        torch.__version__,
        options.examples,
        options.every,
        len(tried),
        survived,
        {mutant.name: mutant.reason for mutant in mutants if mutant.reason is not None},
        dict(left_out(module)),
    )


def _mutants(module: str, options: argparse.Namespace) -> list[Mutant]:
    ruled = list(by_rule(module))[:: options.every]
    return [m for m in (*by_hand(module), *ruled) if re.search(options.only, m.name)]


def report(outcomes: Sequence[Outcome]) -> str:
    """Tables of what was killed, survived, could not be told, and was not made."""
    lines = [
        f"{'module':16}{'mutants':>8}{'killed':>8}{'survived':>10}{'':>9}{'equivalent':>12}{'not made':>10}"
        "   by rule"
    ]
    lines += [_row(one.module, [one]) + _how(one) for one in outcomes]
    lines += [_row("all", outcomes), "", "Survived:"]
    lines += _named([one.survived for one in outcomes])
    lines += ["", "Equivalent, and so not tried:"]
    lines += _named([one.equivalent for one in outcomes])
    lines += ["", "Changes that the rules could make and don't:"]
    counted = sum((Counter(one.left_out) for one in outcomes), Counter[str]())
    lines += [f"{count:6}  {reason}" for reason, count in counted.most_common()]
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    tried = sum(one.tried for one in outcomes)
    alive = sum(len(one.survived) for one in outcomes)
    equivalent = sum(len(one.equivalent) for one in outcomes)
    missing = sum(sum(one.left_out.values()) for one in outcomes)
    percent = f"{100 * (tried - alive) / max(tried, 1):.1f} %"
    return f"{name:16}{tried:8}{tried - alive:8}{alive:10}{percent:>9}{equivalent:12}{missing:10}"


def _how(one: Outcome) -> str:
    share = "all" if one.every == 1 else f"1 of {one.every}"
    return f"   {share:8}{one.date}, torch {one.torch}, {one.examples} examples a property"


def _named(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [
        line for row in rows for name, reason in row.items() for line in (name, f"    {reason}")
    ]
    return [f"  {line}" for line in lines or ["none"]]


def _kept() -> dict[str, Outcome]:
    """What was found before, by module."""
    rows = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    return {row["module"]: Outcome(**row) for row in rows if row["module"] in PATHS}


def _keep(outcomes: Sequence[Outcome]) -> None:
    RECORDS.write_text(json.dumps([dataclasses.asdict(one) for one in outcomes], indent=1) + "\n")
    TABLE.write_text(report(outcomes) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", default=",".join(PATHS), help="which, separated by commas")
    parser.add_argument("--only", default="", help="mutants in whose name this pattern is found")
    parser.add_argument("--examples", type=int, default=60, help="drawn graphs for each property")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--every", type=int, default=1, help="one of so many of those made by rule")
    parser.add_argument("--list", action="store_true", help="print their names and stop")
    parser.add_argument(
        "--keep", action="store_true", help=f"write {TABLE.name}; other modules keep what it says"
    )
    options = parser.parse_args()
    if options.keep and options.only:
        parser.error("--keep is for all mutants of a module: leave out --only")
    modules = options.modules.split(",")
    if options.list:
        print("\n".join(m.name for module in modules for m in _mutants(module, options)))
        return 0
    _import_what_is_slow()
    outcomes = _kept() if options.keep else {}
    for module in modules:
        with multiprocessing.get_context("fork").Pool(1) as alone:
            outcomes[module] = alone.apply(run_module, (module, options))
        if options.keep:  # after each module: all of them take hours
            _keep([outcomes[name] for name in PATHS if name in outcomes])
    found = [outcomes[name] for name in PATHS if name in outcomes]
    print("\n" + report(found))
    return (
        0
        if sum(len(o.survived) for o in found) <= MOST_SURVIVE * sum(o.tried for o in found)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
