"""Mutants of `fxpasses.passes.check_gradients`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
EQUIVALENT = {
    "constant: True -> False, in changed.meta[DELIVERED] = True": "the key says it, whatever its value",
}
