"""Mutants of `fxpasses.passes.check_sums`: see `bench.mutations`."""

WRITTEN = (
    ("products counted", "made.keys() - checks - products", "made.keys() - checks"),
    (
        "last sum missed",
        "for node, check in checks.items()\n",
        "for node, check in list(checks.items())[:-1] or checks.items()\n",
    ),
    ("alarms are not written", "        write_alarms(graph, self.name, wrong)\n", ""),
)
EQUIVALENT: dict[str, str] = {}
