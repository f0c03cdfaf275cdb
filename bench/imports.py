"""Which of our modules import another: the rest can be loaded before that one is changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
_PACKAGES = ("custom_ops", "fxpasses", "tests")


def untouched(changed: str, roots: str) -> list[str]:
    """What modules import, and they themselves, but for what imports a module that will be changed.

    Args:
        changed: name of that module.
        roots: how names of modules begin that are going to be used.
    """
    graph = _imports()
    used = {name for name in graph if name.startswith(roots)}
    used.update(*(nx.descendants(graph, name) for name in list(used)))
    return sorted(used - nx.ancestors(graph, changed) - {changed})


def _imports() -> nx.DiGraph:
    """Module → modules whose code runs when it is imported."""
    paths = [path for package in _PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = {_name(path): path for path in paths if not path.name.startswith(("test_", "conftest"))}
    graph = nx.DiGraph()
    for name, path in names.items():
        graph.add_node(name)
        read = {name.rpartition(".")[0], *_read(ast.parse(path.read_text()).body)}
        graph.add_edges_from((name, other) for other in read if other in names)
    return graph


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(body: list[ast.stmt]) -> Iterator[str]:
    """Names that may be modules, imported outside functions."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield statement.module or ""
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _read([*statement.body, *getattr(statement, "orelse", [])])
