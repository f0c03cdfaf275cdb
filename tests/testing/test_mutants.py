"""The mutants of `bench.mutants`: what can be said of them without running them."""

import ast

import pytest

from bench.mutation_rules import by_rule
from bench.mutations import PATHS, by_hand, reasons, source_of


@pytest.mark.parametrize("module", PATHS)
def test_every_mutant_changes_a_source_that_stays_python(module):
    written = list(by_hand(module))  # raises where the source has moved on
    assert written
    for mutant in written:
        compile(mutant.source, mutant.name, "exec")


def test_every_rule_changes_something():
    original = ast.unparse(ast.parse(source_of("order")))
    assert original not in [mutant.source for mutant in by_rule("order")]


@pytest.mark.parametrize("module", [module for module in PATHS if reasons(module)])
def test_reasons_belong_to_mutants(module):
    found = {m.reason or m.known for m in (*by_hand(module), *by_rule(module))}
    assert set(reasons(module).values()) <= found
