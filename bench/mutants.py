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
import multiprocessing
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.imports import untouched
from bench.mutant_checks import checks_of
from bench.mutant_report import TABLE, Outcome, keep, kept, report
from bench.mutation_rules import by_rule, left_out
from bench.mutations import PATHS, Mutant, by_hand, file_of, source_of

SURVIVED = "SURVIVED"
MOST_SURVIVE = 0.05
_FEW = 8  # examples that find most mutants
_AS_LONG, _AT_LEAST_S = 3, 5  # times that what the original takes, and more

# Running them


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._name, self._source = PATHS[mutant.module], mutant.source
        self._file = str(file_of(mutant.module))

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._file, loader=self)

    def exec_module(self, module: Any) -> None:
        exec(compile(self._source, f"<mutant of {self._name}>", "exec"), module.__dict__)


def _try(mutant: Mutant, examples: int) -> str:
    """In the child: why the mutant is found out, or an empty text."""
    sys.meta_path.insert(0, _Instead(mutant))
    try:
        from fxpasses.testing import check

        check.PHASES = [p for p in check.PHASES if p.name in ("explicit", "generate")]
        drawn, single = checks_of(mutant.module)
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
    outcomes = kept() if options.keep else {}
    for module in modules:
        with multiprocessing.get_context("fork").Pool(1) as alone:
            outcomes[module] = alone.apply(run_module, (module, options))
        if options.keep:  # after each module: all of them take hours
            keep([outcomes[name] for name in PATHS if name in outcomes])
    found = [outcomes[name] for name in PATHS if name in outcomes]
    print("\n" + report(found))
    return (
        0
        if sum(len(o.survived) for o in found) <= MOST_SURVIVE * sum(o.tried for o in found)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
