"""Mutants of `fxpasses.passes.running_stats`: see `bench.mutations`."""

WRITTEN = (
    ("no wait", "torch.ops._c10d_functional.wait_tensor(x).split", "x.split"),
    ("from rank 1", "0, self.group", "1, self.group"),
    ("state is not written", "graph.write_buffer(spec, new)", "pass"),
    ("mixed dtypes", "return str(spec.dtype), str(spec.device)", 'return "", str(spec.device)'),
    ("integers too", "if s.dtype.is_floating_point]", "]"),
    (
        "not sorted first",
        "itertools.groupby(sorted(specs, key=_form), key=_form)",
        "itertools.groupby(specs, key=_form)",
    ),
    (
        "sends at the end",
        "            before,\n            lambda xs",
        "            graph.output_node,\n            lambda xs",
    ),
    (
        "waits at once",
        "            graph.output_node,\n            lambda x: [",
        "            launch.next,\n            lambda x: [",
    ),
    (
        "other order back",
        "for spec, new in zip(specs, news, strict=True):",
        "for spec, new in zip(specs, news[::-1], strict=True):",
    ),
    (
        "first dtype only",
        "in enumerate(zip(groups, values, strict=True)):",
        "in enumerate(zip(groups[:1], values[:1], strict=True)):",
    ),
    (
        "own statistics",
        "graph.write_buffer(spec, new)",
        "graph.write_buffer(spec, graph.buffer(spec))",
    ),
)
EQUIVALENT: dict[str, str] = {
    "keyword: max(nodes, key=positions.__getitem__) -> max(nodes)": "torch compares nodes by their place",
}
