"""Mutants of `fxpasses.passes.check_values`: see `bench.mutations`."""

WRITTEN = (
    ("limit of the sum", "~((g.abs() <= limit)", "~((g.abs().sum() <= limit)"),
    ("one sign only", "g.abs() <= limit", "g <= limit"),
    ("every element has to be above", "& g.isfinite()).all()", "& g.isfinite()).any()"),
    (
        "bits in place of numbers left out",
        'g.meta["val"].is_floating_point()',
        'g.meta["val"].dim()',
    ),
)
EQUIVALENT: dict[str, str] = {}
