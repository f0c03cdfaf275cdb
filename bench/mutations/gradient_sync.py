"""Mutants of `fxpasses.passes.gradient_sync`: see `bench.mutations`."""

WRITTEN = (
    (
        "waits early",
        "place = bucket.readers[0] if self.overlap else launch.next",
        "place = launch.next",
    ),
    (
        "waits late without overlap",
        "place = bucket.readers[0] if self.overlap else launch.next",
        "place = bucket.readers[0]",
    ),
    (
        "reduces only the first bucket",
        "buckets = filled_buckets(graph, self.name)",
        "buckets = filled_buckets(graph, self.name)[:1]",
    ),
    (
        "buckets backwards",
        "[dense.launch(graph, bucket) for bucket in buckets]",
        "[dense.launch(graph, bucket) for bucket in buckets[::-1]][::-1]",
    ),
    ("says it changed nothing", "            True,\n", "            False,\n"),
)
EQUIVALENT: dict[str, str] = {
    "keyword: min((bucket.readers[0] for bucket in buckets), key=order.__getitem__) "
    "-> min((bucket.readers[0] for bucket in buckets))": "torch compares nodes by their place",
    "by hand: buckets backwards": "a launch stands behind its own bucket",
}
