"""Mutants of `fxpasses.passes.settle_checks`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
EQUIVALENT: dict[str, str] = {}
