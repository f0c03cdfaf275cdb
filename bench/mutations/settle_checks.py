"""Mutants of `fxpasses.passes.settle_checks`: see `bench.mutations`."""

WRITTEN = (
    ("in front of the launch", "launch.append(comparison)", "launch.prepend(comparison)"),
    ("sums stay where they were", "            _sum_at_once(graph, comparison)\n", ""),
    ("among the inputs", "front = graph.behind(made).prev", "front = made"),
    ("first launch for the last", "last = max(launches", "last = min(launches"),
)
EQUIVALENT = {
    "keyword: max(launches, key=order.__getitem__, default=None) -> max(launches, default=None)": (
        "nodes compare by where they stand"
    ),
}
