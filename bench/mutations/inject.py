"""Mutants of `fxpasses.passes.inject`: see `bench.mutations`."""

WRITTEN = (
    (
        "the backward's in the forward",
        "return operator_sites(graph, FORWARD)",
        "return operator_sites(graph, BACKWARD)",
    ),
    (
        "gradients are left out",
        "gradient_sites(graph) + operator_sites(graph, BACKWARD)",
        "operator_sites(graph, BACKWARD)",
    ),
    (
        "gradients come last",
        "gradient_sites(graph) + operator_sites(graph, BACKWARD)",
        "operator_sites(graph, BACKWARD) + gradient_sites(graph)",
    ),
    (
        "one of several parameters",
        "graph.set_outputs(dict.fromkeys(indices, struck))",
        "graph.set_outputs({indices[0]: struck})",
    ),
    (
        "comparisons see what was",
        "            reader.replace_input_with(node, struck)\n",
        "            pass\n",
    ),
)
EQUIVALENT: dict[str, str] = {}
KNOWN = {
    "condition: if 'bucket' in payload.meta: struck.meta['bucket'] = payload.meta['buc -> "
    "if True: struck.meta['bucket'] = payload.meta['bucket']": "all that our passes send are buckets",
}
