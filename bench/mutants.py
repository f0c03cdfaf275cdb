"""Break our passes in hundreds of small ways, and count how many of these the property tests notice.

Each mutant is one change to the source of a pass, made by rule on its syntax tree or written by hand. It is
loaded in a forked child in place of the module, and only the properties of `tests/testing/properties.py` run
against it: none of the tests that somebody wrote for a case.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.abc
import importlib.util
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.mutation_rules import by_rule
from bench.mutations import PATHS, Mutant, by_hand


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
    from tests.testing import casts, clipping, scaling
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
        *searches(p.overlap_changes_nothing),
    ]
    compressed = [holds(name) for name in p.OWN if name.startswith("compress_")]
    own: dict[str, list[Callable[[], None]]] = {
        "bucketing": [holds("bucketing"), *searches(p.bucket_layouts, p.bucket_limits, p.layouts)],
        "gradient_sync": synchronised,
        "reduction": synchronised,
        "participation": [holds("participation"), *searches(p.layouts)],
        "running_stats": [holds("running_stats")],
        "cast": [*casts.SINGLE, holds("cast")],
        "loss_scale": [*scaling.SINGLE, holds("loss_scale")],
        "overflow": [*scaling.SINGLE, holds("overflow"), *searches(scaling.overflow_of_buckets)],
        "clip_norm": [clipping.what_is_not_finite, holds("clip_norm")],
        **dict.fromkeys(("compress", "exchange", "codecs", "feedback"), compressed),
        "powersgd": [holds("compress_powersgd")],
        "rewrite": [
            p.splice_refuses_tensors, p.splice_takes_branches,
            p.splice_takes_numbers, p.splice_tells_arguments_apart, p.model_lines,
            *searches(p.splice_inlines), holds("bucketing"),
        ],
        "variants": [p.layout_of_a_variant, *searches(p.variants_as_promised)],
    }  # fmt: skip
    return [p.rules_refuse, *own[module]]


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
            os.write(writing, (why or "SURVIVED").encode())
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", default=",".join(PATHS), help="which, separated by commas")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--examples", type=int, default=60, help="drawn graphs for each property")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--every", type=int, default=1, help="one of so many of those made by rule")
    parser.add_argument("--list", action="store_true", help="print their names and stop")
    options = parser.parse_args()
    chosen = options.modules.split(",")
    mutants = [m for module in chosen for m in by_hand(module)]
    ruled = [m for module in chosen for m in by_rule(module)]
    mutants += ruled[:: options.every]
    mutants = [m for m in mutants if options.only in m.name]
    if options.list:
        print("\n".join(m.name for m in mutants))
        return 0
    return _report(mutants, options)


def _report(mutants: list[Mutant], options: argparse.Namespace) -> int:
    _import_what_is_slow()
    counted = [m for m in mutants if m.reason is None]
    survivors: list[Mutant] = []
    for mutant, why in run_all(counted, options.jobs, options.examples, options.timeout):
        if why == "SURVIVED":
            survivors.append(mutant)
        print(f"{'survived' if why == 'SURVIVED' else 'killed  '} {mutant.name}", flush=True)
        if why != "SURVIVED":
            print(f"             {why}", flush=True)
    for mutant in mutants:
        if mutant.reason is not None:
            print(f"equivalent {mutant.name}\n             {mutant.reason}")
    print("\n" + "\n".join(f"survived: {m.name}" for m in survivors))
    print(f"\n{'module':16}{'mutants':>8}{'killed':>8}{'equivalent':>12}")
    modules = list(dict.fromkeys(m.module for m in mutants))
    for module in [*modules, "all"]:
        print(_row(module, mutants, counted, survivors))
    return 0 if len(survivors) <= 0.05 * len(counted) else 1


def _row(module: str, mutants: list[Mutant], counted: list[Mutant], survivors: list[Mutant]) -> str:
    """A module's line of the table: those that count, how many of them are killed, and those that don't."""
    whole, tried, alive = (
        sum(module in (m.module, "all") for m in group) for group in (mutants, counted, survivors)
    )
    percent = f"{100 * (tried - alive) / max(tried, 1):.1f} %"
    return f"{module:16}{tried:8}{percent:>8}{whole - tried:12}"


if __name__ == "__main__":
    sys.exit(main())
