"""Mutants of `fxpasses.passes.replay`: see `bench.mutations`."""

WRITTEN = (
    ("what nobody checks too", "[region for region in found if region.is_checked]", "list(found)"),
    (
        "one region alone",
        "for region in regions\n        ]\n        write",
        "for region in regions[:1]\n        ]\n        write",
    ),
    ("nobody knows", "        write_alarms(graph, self.name, replayed, REPLAYED)\n", ""),
    (
        "told as an alarm",
        "write_alarms(graph, self.name, replayed, REPLAYED)",
        "write_alarms(graph, self.name, replayed)",
    ),
    ("all faults are stuck", 'fault.model == "stuck" for', 'fault.model != "stuck" for'),
    (
        "any node of the backward",
        '{node for node in graph.walk() if node.meta.get("fwd_nn_module_stack")}',
        "set(graph.walk())",
    ),
)
EQUIVALENT: dict[str, str] = {}
