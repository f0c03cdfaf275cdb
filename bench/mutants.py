"""Break our passes in hundreds of small ways, and count how many of these the property tests notice.

Each mutant is one change to the source of a pass, made by rule on its syntax tree or written by hand. It is
loaded in a forked child in place of the module, and only the properties of `tests/testing/properties.py` run
against it: none of the tests that somebody wrote for a case.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import importlib.abc
import importlib.util
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.mutations import EQUIVALENT, WRITTEN

ROOT = Path(__file__).parent.parent
MODULES = {
    "bucketing": "fxpasses.passes.bucketing",
    "gradient_sync": "fxpasses.passes.gradient_sync",
    "reduction": "fxpasses.reduction",
    "participation": "fxpasses.passes.participation",
    "running_stats": "fxpasses.passes.running_stats",
    "cast": "fxpasses.passes.cast",
    "loss_scale": "fxpasses.passes.loss_scale",
    "overflow": "fxpasses.passes.overflow",
    "clip_norm": "fxpasses.passes.clip_norm",
    "compress": "fxpasses.passes.compress",
    "exchange": "fxpasses.exchange",
    "codecs": "fxpasses.codecs",
    "feedback": "fxpasses.feedback",
    "powersgd": "fxpasses.powersgd",
    "rewrite": "fxpasses.rewrite",
    "variants": "fxpasses.variants",
}
STATEMENTS = ("error_bound", "has_work", "tolerance", "loss_bound")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A changed source: of which module, in which way."""

    module: str
    name: str
    source: str

    @property
    def reason(self) -> str | None:
        """Why no test can tell it from the original, if that is known; whatever the line it stands in."""
        return EQUIVALENT.get(re.sub(r":\d+", "", self.name, count=1))


def source_of(module: str) -> str:
    return (ROOT / (MODULES[module].replace(".", "/") + ".py")).read_text()


# Mutants by rule


def by_rule(module: str) -> Iterator[Mutant]:
    """Every change that a rule can make at one place."""
    tree = ast.parse(source_of(module))
    for position, node in enumerate(_code(tree)):
        for number, _ in enumerate(_changes(node)):
            changed = copy.deepcopy(tree)
            target = list(_code(changed))[position]
            before = ast.unparse(target)
            what, replacement = _changes(target)[number]
            _replace(changed, target, replacement)
            after = ast.unparse(replacement) if replacement is not None else "(nothing)"
            name = f"{module}:{node.lineno} {what}: {_one_line(before)} -> {_one_line(after)}"
            yield Mutant(module, name, ast.unparse(ast.fix_missing_locations(changed)))


def _one_line(code: str) -> str:
    return " ".join(code.split())[:70]


def _code(tree: ast.Module) -> Iterator[Any]:
    """The expressions and statements inside functions; no docstrings, messages or names of nodes, and not
    what a pass says of itself, which is what it is judged by.
    """
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in STATEMENTS:
            for statement in function.body:
                yield from _inside(statement)


def _inside(node: ast.AST) -> Iterator[Any]:
    if isinstance(node, ast.keyword) and node.arg in ("strict", "name"):
        return  # a second look at lengths that are equal; how nodes are called
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_text or isinstance(node, ast.Raise | ast.JoinedStr | ast.FunctionDef | ast.Assert):
        return
    if hasattr(node, "lineno"):
        yield node
    for name, child in ast.iter_fields(node):
        if name == "annotation":
            continue
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from _inside(each)


_OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip


def _changes(node: Any) -> list[tuple[str, ast.AST | None]]:
    """(kind, replacement) of each change at a node; None removes the statement."""
    found: list[tuple[str, ast.AST | None]] = []
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _OPERATORS:
        found.append(("operator", _with(node, op=_OPERATORS[type(node.op)]())))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        operators = [_OPERATORS[type(node.ops[0])](), *node.ops[1:]]
        found.append(("comparison", _with(node, ops=operators)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        found.append(("negation", node.operand))
    if isinstance(node, ast.Constant):
        found += [("constant", ast.Constant(value)) for value in _other_values(node.value)]
    if isinstance(node, ast.IfExp):
        found += [("branch", node.body), ("branch", node.orelse)]
    if isinstance(node, ast.If):
        found += [("condition", _with(node, test=ast.Constant(x))) for x in (True, False)]
    if isinstance(node, ast.Call):
        found += _call_changes(node)
    if isinstance(node, ast.comprehension) and node.ifs:
        found.append(("filter", _with(node, ifs=[])))
    if isinstance(node, ast.Expr | ast.AugAssign):
        found.append(("statement", ast.Pass()))
    return found


def _call_changes(node: ast.Call) -> list[tuple[str, ast.AST | None]]:
    found: list[tuple[str, ast.AST | None]] = []
    if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        found.append(("arguments", _with(node, args=swapped)))
    for position, keyword in enumerate(node.keywords):
        if keyword.arg in ("key", "reverse", "parameters", "rule", "changed", "counts"):
            others = node.keywords[:position] + node.keywords[position + 1 :]
            found.append(("keyword", _with(node, keywords=others)))
    return found


def _other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    return [value + "x"] if isinstance(value, str) and value.isidentifier() else []


def _with(node: Any, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _replace(tree: ast.AST, target: ast.AST, replacement: ast.AST | None) -> None:
    for parent in ast.walk(tree):
        for name, child in ast.iter_fields(parent):
            if child is target:
                setattr(parent, name, replacement)
                return
            if isinstance(child, list) and any(each is target for each in child):
                at = next(i for i, each in enumerate(child) if each is target)
                child[at] = replacement
                return
    raise AssertionError("the node is in the tree")


def by_hand(module: str) -> Iterator[Mutant]:
    """The changes that somebody thought of."""
    source = source_of(module)
    for of, name, old, new in WRITTEN:
        if of == module:
            if source.count(old) != 1:
                raise ValueError(
                    f"mutant {name!r}: {old!r} stands {source.count(old)} times in {module}"
                )
            yield Mutant(module, f"{module} by hand: {name}", source.replace(old, new))


# Running them


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self._name, self._source = MODULES[mutant.module], mutant.source

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
    parser.add_argument("--modules", default=",".join(MODULES), help="which, separated by commas")
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
