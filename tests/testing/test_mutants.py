"""The mutants of `bench.mutants`: what can be said of them without running them."""

import pytest

from bench.mutants import MODULES, by_hand, by_rule
from bench.mutations import EQUIVALENT, WRITTEN


@pytest.mark.parametrize("module", MODULES)
def test_every_mutant_changes_a_source_that_stays_python(module):
    written = list(by_hand(module))  # raises where the source has moved on
    assert len(written) == sum(row[0] == module for row in WRITTEN) > 0
    for mutant in written:
        compile(mutant.source, mutant.name, "exec")


def test_reasons_belong_to_mutants():
    modules = {name.split()[0] for name in EQUIVALENT}
    found = {m.reason for module in modules for m in (*by_hand(module), *by_rule(module))}
    assert set(EQUIVALENT.values()) <= found
