"""Mutants of `fxpasses.passes.check_values`: see `bench.mutations`."""

WRITTEN = (
    ("limit of the sum", "~((g.abs() <= limit)", "~((g.abs().sum() <= limit)"),
    ("one sign only", "g.abs() <= limit", "g <= limit"),
    ("every element has to be above", "& is_finite(g)).all()", "& is_finite(g)).any()"),
    ("gradients without dimensions left out", 'is_inexact(g.meta["val"])', 'g.meta["val"].dim()'),
)
EQUIVALENT: dict[str, str] = {}
