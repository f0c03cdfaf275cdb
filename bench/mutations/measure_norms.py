"""Mutants of `fxpasses.passes.measure_norms`: see `bench.mutations`."""

WRITTEN = (
    (
        "norm of all in the bucket",
        "vector_norm(parts[at], dtype=wide)",
        "vector_norm(reduced, dtype=wide)",
    ),
    ("narrow norms", "torch.promote_types(reduced.dtype, torch.float32)", "torch.float32"),
    ("average forgets", "DECAY * average + (1 - DECAY) * norms", "norms"),
    (
        "swapped weights",
        "DECAY * average + (1 - DECAY) * norms",
        "(1 - DECAY) * average + DECAY * norms",
    ),
    ("nobody counts", "count + 1", "count"),
    ("infinite norms stay", "norms.isfinite().all()", "norms.isfinite().any() | True"),
    ("state is not written", "        graph.write_state(spec.name, written)\n", ""),
    ("those that don't adapt too", ".scheme == ADAPTIVE and", ".scheme != 'nothing' and"),
    (
        "in the order of the bucket's first ones",
        "[bucket.parameters.index(name) for name in names]",
        "list(range(len(names)))",
    ),
    ("says that nothing changed", "Report(bool(measured),", "Report(False,"),
)
EQUIVALENT: dict[str, str] = {}
