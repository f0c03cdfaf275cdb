"""Mutants of `fxpasses.passes.loss_scale`: see `bench.mutations`."""

WRITTEN = (
    ("gradients multiplied", "return scale, 1.0 / scale", "return scale, scale"),
    (
        "gradients multiplied by the state",
        "scale.double().reciprocal().float()",
        "scale.double().float()",
    ),
    (
        "reciprocal in half precision",
        "scale.double().reciprocal().float()",
        "scale.double().reciprocal().bfloat16().float() * 0.999",
    ),
    ("tangents as they were", "product = _product(x, scale)", "product = _product(x, 1.0)"),
    (
        "gradients as they were",
        "lambda x, reciprocal: _product(x, reciprocal).to(x.dtype)",
        "lambda x, reciprocal: _product(x, 1.0).to(x.dtype)",
    ),
    (
        "scaled twice",
        "product = _product(x, scale)",
        "product = _product(_product(x, scale), scale)",
    ),
    (
        "scaled down, then up",
        "scale, reciprocal = self._factors(",
        "reciprocal, scale = self._factors(",
    ),
    (
        "first tangent missed",
        "        for tangent in tangents:\n",
        "        for tangent in tangents[1:]:\n",
    ),
    (
        "last gradient missed",
        "graph.set_outputs({i: unscaled[n] for i, n in leaving.items()})",
        "graph.set_outputs({i: unscaled[n] for i, n in list(leaving.items())[:-1]})",
    ),
    (
        "gradients of inputs missed",
        'graph.outputs("gradient") + graph.outputs("input_gradient")\n',
        'graph.outputs("gradient")\n',
    ),
    (
        "gradients of parameters missed",
        'graph.outputs("gradient") + graph.outputs("input_gradient")\n',
        'graph.outputs("input_gradient")\n',
    ),
    (
        "multiplies in half precision",
        "return x.float() * factor if x.dtype.itemsize < 4 else x * factor",
        "return x * factor",
    ),
    (
        "everything in fp32",
        "return x.float() * factor if x.dtype.itemsize < 4 else x * factor",
        "return x.float() * factor",
    ),
    (
        "rounded before it is cast",
        "from fxpasses.precision import is_cast\n",
        "is_cast = (lambda node: False)\n",
    ),
    (
        "not rounded at all",
        "read_instead(graph, others, tangent, rounded[0])",
        "read_instead(graph, others, tangent, exact)",
    ),
    (
        "one reader missed",
        "read_instead(graph, others, tangent",
        "read_instead(graph, others[1:], tangent",
    ),
    (
        "casts missed",
        "read_instead(graph, casts, tangent",
        "read_instead(graph, casts[1:], tangent",
    ),
    ("gradients left in fp32", "_product(x, reciprocal).to(x.dtype)", "_product(x, reciprocal)"),
    ("constant gradients too", "for i, node in made if reach[node]}", "for i, node in made}"),
    ("tangents that are gradients too", ' and n.op != "placeholder")', ")"),
    (
        "idle tangents too",
        '[node for node, _ in graph.inputs("tangent") if node in needed]',
        '[node for node, _ in graph.inputs("tangent")]',
    ),
    (
        "unscaled at the end",
        "            graph.behind(node),\n",
        "            graph.output_node,\n",
    ),
    (
        "once for each output",
        "for n in dict.fromkeys(leaving.values())}",
        "for n in leaving.values()}",
    ),
    (
        "state in double",
        'StateSpec(SCALE_STATE, "", (), torch.float32, device)',
        'StateSpec(SCALE_STATE, "", (), torch.float64, device)',
    ),
    ("state of the wrong kind", 'StateSpec(SCALE_STATE, "",', 'StateSpec("overflow", "",'),
    (
        "says it changed nothing",
        'return Report(True, {"tangents"',
        'return Report(False, {"tangents"',
    ),
)
EQUIVALENT: dict[str, str] = {
    "comparison: x.dtype.itemsize < 4 -> x.dtype.itemsize <= 4": "fp32 stays fp32",
    "constant: 4 -> 5, in x.dtype.itemsize < 4": "fp32 stays fp32",
}
