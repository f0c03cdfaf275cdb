"""Mutants of `fxpasses.passes.participation`: see `bench.mutations`."""

WRITTEN = (
    (
        "no wait",
        "            torch.ops._c10d_functional.wait_tensor,\n            launch,",
        "            lambda x: x * 1,\n            launch,",
    ),
    ("sends at the end", "            graph.first_call,\n", "            graph.output_node,\n"),
    (
        "waits at once",
        "            graph.output_node,\n            torch.ops",
        "            launch.next,\n            torch.ops",
    ),
    ("state is not written", "graph.write_state(spec.name, total)", "pass"),
    ("always acts", "len(tangent_sets(graph, reach)) < 2:", "False:"),
    (
        "acts from three on",
        "len(tangent_sets(graph, reach)) < 2:",
        "len(tangent_sets(graph, reach)) < 3:",
    ),
    ("by maximum", '(x, "sum", self.group)', '(x, "max", self.group)'),
    ("in double", "(flags,), torch.float32", "(flags,), torch.float64"),
    (
        "one flag too few",
        'StateSpec(STATE_KIND, "", (flags,)',
        'StateSpec(STATE_KIND, "", (flags - 1,)',
    ),
    (
        "inputs' gradients left out",
        'role.kind in ("gradient", "input_gradient")',
        'role.kind in ("gradient",)',
    ),
    ("constants count", "node is not None and reach[node]\n", "node is not None\n"),
)
EQUIVALENT: dict[str, str] = {}
