"""Mutants of `fxpasses.passes.check_gradients`: see `bench.mutations`."""

WRITTEN = (
    (
        "compared at once",
        "            graph.output_node,\n            torch.ops.fxpasses.changed",
        "            graph.behind(total),\n            torch.ops.fxpasses.changed",
    ),
    ("sum taken at the end", "            graph.behind(node),", "            graph.output_node,"),
    ("comparison goes nowhere", "        changed.meta[DELIVERED] = True\n", ""),
    ("alarms are not written", "        write_alarms(graph, self.name, wrong)\n", ""),
)
EQUIVALENT = {
    "constant: True -> False, in changed.meta[DELIVERED] = True": "the key says it, whatever its value",
}
