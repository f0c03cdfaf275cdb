"""Mutants of `fxpasses.passes.agree_alarms`: see `bench.mutations`."""

WRITTEN = (
    ("all-reduce sums", 'all_reduce(x, "max", self.group)', 'all_reduce(x, "sum", self.group)'),
    (
        "smallest of all ranks",
        'all_reduce(x, "max", self.group)',
        'all_reduce(x, "min", self.group)',
    ),
    ("result is not written", "        graph.write_state(name, arrived)\n", ""),
    ("own alarm is written", "graph.write_state(name, arrived)", "graph.write_state(name, alarm)"),
    (
        "launched before the alarm",
        "            graph.behind(alarm),",
        "            graph.first_call,",
    ),
    ("says that nothing changed", "Report(True, ", "Report(False, "),
)
EQUIVALENT: dict[str, str] = {}
