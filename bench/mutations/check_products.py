"""Mutants of `fxpasses.passes.check_products`: see `bench.mutations`."""

WRITTEN = (
    (
        "backward as well",
        "        return forward_nodes(graph)\n",
        "        return set(graph.walk())\n",
    ),
    ("last product missed", "for node in products]", "for node in products[:-1] or products]"),
    ("alarms are not written", "        write_alarms(graph, self.name, wrong)\n", ""),
)
EQUIVALENT: dict[str, str] = {}
