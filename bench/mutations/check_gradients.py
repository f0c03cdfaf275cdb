"""Mutants of `fxpasses.passes.check_gradients`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
EQUIVALENT: dict[str, str] = {}
