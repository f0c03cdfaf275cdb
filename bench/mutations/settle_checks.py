"""Mutants of `fxpasses.passes.settle_checks`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
EQUIVALENT = {
    "keyword: max(launches, key=order.__getitem__, default=None) -> max(launches, default=None)": (
        "nodes compare by where they stand"
    ),
}
