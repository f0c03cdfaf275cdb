"""Mutants by rule: each change that can be made at one place of a module's syntax tree."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bench.mutations import Mutant, source_of

# What a pass says of itself is what it is judged by.
STATEMENTS = ("error_bound", "has_work", "tolerance", "loss_bound")
# Where nothing is changed, and why; counted (`left_out`), so that a report can say what it does not cover.
_STATEMENT = "what a pass says of itself, by which it is judged"
_MESSAGE = "text: of errors, or put together for names"
_ASSERTION = "assertions of what can't be otherwise"
_NAME = "how nodes are called"
_STRICT = "a second look at lengths that are equal"
_SYMMETRIC = "arguments that may stand either way round: of max, min, promote_types"


def by_rule(module: str) -> Iterator[Mutant]:
    """Every change that a rule can make at one place."""
    tree = ast.parse(source_of(module))
    for node, reason in list(_code(tree)):
        for kind, replacement in _changes(node):
            if reason or _why_not(node, kind) or ast.unparse(node) == ast.unparse(replacement):
                continue
            before, where = _one_line(ast.unparse(node)), _where(tree, node)
            after = _one_line(ast.unparse(replacement))
            _replace(tree, node, replacement)
            changed = ast.unparse(tree)
            _replace(tree, replacement, node)
            name = f"{module}:{node.lineno} {kind}: {before} -> {after}{where}"
            yield Mutant(module, name, changed)


def _where(tree: ast.Module, target: ast.AST) -> str:
    """Around a constant: by itself it does not say what it is for."""
    if not isinstance(target, ast.Constant):
        return ""
    around = _parent(tree, target)
    if isinstance(around, ast.UnaryOp):  # a negative number
        around = _parent(tree, around)
    return f", in {_one_line(ast.unparse(around))}"


def _parent(tree: ast.Module, node: ast.AST) -> ast.AST:
    return next(n for n in ast.walk(tree) if any(c is node for c in ast.iter_child_nodes(n)))


def left_out(module: str) -> Counter[str]:
    """How many changes the rules could make and don't, by the reason."""
    found: Counter[str] = Counter()
    for node, reason in _code(ast.parse(source_of(module))):
        found.update(filter(None, (reason or _why_not(node, kind) for kind, _ in _changes(node))))
    return found


def _why_not(node: ast.AST, kind: str) -> str | None:
    """Why one change at a node is not made."""
    is_swap = kind == "arguments" and isinstance(node, ast.Call)
    name = ast.unparse(node.func).rpartition(".")[2] if is_swap else ""
    return _SYMMETRIC if name in ("max", "min", "promote_types") else None


def _one_line(code: str) -> str:
    return " ".join(code.split())[:70]


def _code(tree: ast.Module) -> Iterator[tuple[Any, str | None]]:
    """The expressions and statements inside functions, with the reason why one is left as it is."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from _inside(statement, _STATEMENT if function.name in STATEMENTS else None)


def _inside(node: ast.AST, reason: str | None) -> Iterator[tuple[Any, str | None]]:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_docstring or isinstance(node, ast.FunctionDef):  # which comes by itself
        return
    reason = reason or _reason(node)
    if hasattr(node, "lineno"):
        yield node, reason
    for name, child in ast.iter_fields(node):
        if name == "annotation":
            continue
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from _inside(each, reason)


def _reason(node: ast.AST) -> str | None:
    if isinstance(node, ast.keyword):
        return {"name": _NAME, "strict": _STRICT}.get(node.arg or "")
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return _MESSAGE
    return _ASSERTION if isinstance(node, ast.Assert) else None


_OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip


def _changes(node: Any) -> list[tuple[str, ast.AST]]:
    """(kind, replacement) of each change at a node."""
    found: list[tuple[str, ast.AST]] = []
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


def _call_changes(node: ast.Call) -> list[tuple[str, ast.AST]]:
    found: list[tuple[str, ast.AST]] = []
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


def _replace(tree: ast.AST, target: ast.AST, replacement: ast.AST) -> None:
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
