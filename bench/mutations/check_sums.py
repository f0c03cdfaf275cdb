"""Mutants of `fxpasses.passes.check_sums`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
EQUIVALENT: dict[str, str] = {}
