"""Mutants of `fxpasses.variants`: see `bench.mutations`."""

WRITTEN = (
    ("pending not added", "graph.set_output(gradient.index, total)", "pass"),
    ("pending subtracted", "        torch.add,\n", "        torch.sub,\n"),
    ("empty gradients too", 'if gradient.node.meta["val"].numel():', "if True:"),
    ("in every mode", "if variant.mode == TOTAL:", "if True:"),
    ("never", "if variant.mode == TOTAL:", "if False:"),
    (
        "absent ones are outputs",
        'Role("gradient", spec.parameter)',
        'Role("output", spec.parameter)',
    ),
    ("totals at the end", "graph.behind(gradient.node),", "graph.output_node,"),
    ("twice the pending", "        torch.add,\n", "        lambda a, b: a + b + b,\n"),
    (
        "buffers of the union ignored",
        'graph.module.meta["written_buffers"] = variant.buffers',
        "pass",
    ),
)
EQUIVALENT: dict[str, str] = {}
