"""Mutants of our passes that somebody thought of, and those by rule that change nothing.

`WRITTEN`: (module, name, what stands there, what stands there instead).
`EQUIVALENT`: name of a mutant → why no test can tell it from the original.
"""

from __future__ import annotations

WRITTEN: tuple[tuple[str, str, str, str], ...] = (
    # gradient_sync
    ("gradient_sync", "no wait", "torch.ops._c10d_functional.wait_tensor(x).to(", "x.to("),
    ("gradient_sync", "no division", "x / world if self.reduce", "x if self.reduce"),
    ("gradient_sync", "divides for the sum", 'self.reduce == "mean" and world > 1', "world > 1"),
    ("gradient_sync", "divides by one less", "x / world if", "x / (world - 1) if"),
    (
        "gradient_sync",
        "divides behind the cast",
        "x = x.to(torch.promote_types(own, wire))",
        "x = x.to(wire)",
    ),
    ("gradient_sync", "divides twice", "(x / world if", "(x / world / world if"),
    (
        "gradient_sync",
        "reduces by avg",
        'all_reduce(whole, "sum", group)',
        'all_reduce(whole, "avg", group)',
    ),
    (
        "gradient_sync",
        "reduces by max",
        'all_reduce(whole, "sum", group)',
        'all_reduce(whole, "max", group)',
    ),
    ("gradient_sync", "another group", '"sum", group)', '"sum", "0")'),
    (
        "gradient_sync",
        "wire dtype ignored",
        "wire = TORCH_DTYPES[self.dtype] if self.dtype else own",
        "wire = own",
    ),
    (
        "gradient_sync",
        "result left in the wire dtype",
        '(x).to(flat.meta["val"].dtype)',
        "(x).to(torch.float32)",
    ),
    ("gradient_sync", "waits early", "readers[0] if self.overlap else launch.next", "launch.next"),
    (
        "gradient_sync",
        "waits late without overlap",
        "readers[0] if self.overlap else launch.next",
        "readers[0]",
    ),
    (
        "gradient_sync",
        "launches late",
        "            flat.next,\n            launch,",
        "            graph.output_node,\n            launch,",
    ),
    ("gradient_sync", "reads the local bucket", "reader.replace_input_with(flat, result)", "pass"),
    (
        "gradient_sync",
        "reduces only the first bucket",
        "launches = [self._launch(graph, flat) for flat in flats]",
        "flats = flats[:1]; launches = [self._launch(graph, flat) for flat in flats]",
    ),
    (
        "gradient_sync",
        "buckets backwards",
        "for flat in flats]\n        for",
        "for flat in flats[::-1]][::-1]\n        for",
    ),
    ("gradient_sync", "launch not marked", 'node.meta["reduces"] = True', "pass"),
    (
        "gradient_sync",
        "payload forgets its bucket",
        'node.args[0].meta["bucket"] = flat.meta["bucket"]',
        "pass",
    ),
    ("gradient_sync", "leaves the old bucket", "graph.graph.erase_node(flat)", "pass"),
    (
        "gradient_sync",
        "parts swapped",
        "payload(part) for part in parts]",
        "payload(part) for part in parts[::-1]]",
    ),
    (
        "gradient_sync",
        "first part only",
        "payload(part) for part in parts]",
        "payload(part) for part in parts[:1]]",
    ),
    (
        "gradient_sync",
        "bytes counts elements",
        '.numel() * n.meta["val"].element_size()',
        ".numel()",
    ),
    ("gradient_sync", "says it changed nothing", "Report(bool(flats),", "Report(False,"),
    (
        "gradient_sync",
        "provenance without parameters",
        "bucket.model_line, bucket.parameters)",
        "bucket.model_line)",
    ),
    (
        "gradient_sync",
        "scales in half precision",
        "x = x.to(torch.promote_types(own, wire))",
        "x = x.half()",
    ),
    (
        "gradient_sync",
        "sends twice",
        'node.meta["reduces"] = True',
        'node.meta["reduces"] = True; again = node.args[0]; splice(graph, node.next, '
        'lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", group), again, '
        'name="again", provenance=self._origin(flat, "launch"))',
    ),
    # bucketing
    (
        "bucketing",
        "gradients in output order",
        "order = {g.index: (positions[g.node], g.index)",
        "order = {g.index: (g.index, g.index)",
    ),
    (
        "bucketing",
        "buckets of mixed dtypes",
        "key = (value.dtype, value.device)",
        "key = (torch.float32, value.device)",
    ),
    ("bucketing", "never closes", "if filled[key] >= bucket_bytes:", "if False:"),
    (
        "bucketing",
        "counts elements for bytes",
        "value.numel() * value.element_size()",
        "value.numel()",
    ),
    ("bucketing", "forgets what is left open", "groups += open_groups.values()", "pass"),
    ("bucketing", "size is not reset", "            del filled[key]\n", ""),
    (
        "bucketing",
        "empty gradients in buckets",
        "        if value.numel() == 0:\n            continue\n",
        "",
    ),
    (
        "bucketing",
        "skips 0-dim gradients",
        "if value.numel() == 0:",
        "if value.dim() == 0 or value.numel() == 0:",
    ),
    (
        "bucketing",
        "always logical order",
        "physical = tuple(sorted(logical, key=value.stride, reverse=True))",
        "physical = logical",
    ),
    ("bucketing", "reversed physical order", "key=value.stride, reverse=True", "key=value.stride"),
    (
        "bucketing",
        "does not check density",
        "return physical if value.permute(physical).is_contiguous() else logical",
        "return physical",
    ),
    (
        "bucketing",
        "views not permuted back",
        "return _permute(flat.view([shape[d] for d in permutation]), inverse)",
        "return flat.view(shape)",
    ),
    (
        "bucketing",
        "inverse is the permutation",
        "return _permute(flat.view([shape[d] for d in permutation]), inverse)",
        "return _permute(flat.view([shape[d] for d in permutation]), permutation)",
    ),
    (
        "bucketing",
        "buckets at the end",
        "places = [graph.behind(node) for node in _last_gradients(graph, groups)]",
        "places = [graph.output_node for _ in groups]",
    ),
    (
        "bucketing",
        "views right behind the bucket",
        "            graph.output_node,\n            lambda x: [",
        "            flat.next,\n            lambda x: [",
    ),
    (
        "bucketing",
        "views in another order",
        "zip(group, views, strict=True)",
        "zip(group, views[::-1], strict=True)",
    ),
    (
        "bucketing",
        "one view is missing",
        "graph.set_outputs(views)",
        "graph.set_outputs(dict(list(views.items())[1:]))",
    ),
    (
        "bucketing",
        "off by one group",
        "groups = assign(graph, self.mb * 2**20, self.layout)",
        "groups = assign(graph, self.mb * 2**20, self.layout)[1:]",
    ),
    (
        "bucketing",
        "parameters in another order",
        "parameters = tuple(g.parameter for g in group)",
        "parameters = tuple(sorted(g.parameter for g in group))[::-1]",
    ),
    (
        "bucketing",
        "layout ignored",
        "if layout is not None:\n        order",
        "if False:\n        order",
    ),
    ("bucketing", "MiB are MB", "self.mb * 2**20", "self.mb * 10**6"),
    (
        "bucketing",
        "place of the own last gradient only",
        "max(lasts[: i + 1], key=lambda n: positions[n])",
        "lasts[i]",
    ),
    (
        "bucketing",
        "buckets numbered from one",
        'flat.meta["bucket"] = Bucket(index,',
        'flat.meta["bucket"] = Bucket(index + 1,',
    ),
    (
        "bucketing",
        "a clone too many",
        "return _permute(value, permutation).reshape(-1)",
        "return _permute(value, permutation).clone().reshape(-1)",
    ),
    # participation
    (
        "participation",
        "no wait",
        "            torch.ops._c10d_functional.wait_tensor,\n            launch,",
        "            lambda x: x * 1,\n            launch,",
    ),
    (
        "participation",
        "sends at the end",
        "            graph.first_call,\n",
        "            graph.output_node,\n",
    ),
    (
        "participation",
        "waits at once",
        "            graph.output_node,\n            torch.ops",
        "            launch.next,\n            torch.ops",
    ),
    ("participation", "state is not written", "graph.write_state(spec.name, total)", "pass"),
    ("participation", "always acts", "len(tangent_sets(graph, reach)) < 2:", "False:"),
    (
        "participation",
        "acts from three on",
        "len(tangent_sets(graph, reach)) < 2:",
        "len(tangent_sets(graph, reach)) < 3:",
    ),
    ("participation", "by maximum", '(x, "sum", self.group)', '(x, "max", self.group)'),
    ("participation", "in double", "(flags,), torch.float32", "(flags,), torch.float64"),
    (
        "participation",
        "one flag too few",
        'StateSpec(STATE_KIND, "", (flags,)',
        'StateSpec(STATE_KIND, "", (flags - 1,)',
    ),
    (
        "participation",
        "inputs' gradients left out",
        'role.kind in ("gradient", "input_gradient")',
        'role.kind in ("gradient",)',
    ),
    (
        "participation",
        "constants count",
        "node is not None and reach[node]\n",
        "node is not None\n",
    ),
    # running_stats
    ("running_stats", "no wait", "torch.ops._c10d_functional.wait_tensor(x).split", "x.split"),
    ("running_stats", "from rank 1", "0, self.group", "1, self.group"),
    ("running_stats", "state is not written", "graph.write_state(spec.name, new)", "pass"),
    (
        "running_stats",
        "mixed dtypes",
        "return str(spec.dtype), str(spec.device)",
        'return "", str(spec.device)',
    ),
    ("running_stats", "integers too", "if s.dtype.is_floating_point]", "]"),
    (
        "running_stats",
        "not sorted first",
        "itertools.groupby(sorted(specs, key=_form), key=_form)",
        "itertools.groupby(specs, key=_form)",
    ),
    (
        "running_stats",
        "sends at the end",
        "            before,\n            lambda xs",
        "            graph.output_node,\n            lambda xs",
    ),
    (
        "running_stats",
        "waits at once",
        "            graph.output_node,\n            lambda x: [",
        "            launch.next,\n            lambda x: [",
    ),
    (
        "running_stats",
        "other order back",
        "for spec, new in zip(specs, news, strict=True):",
        "for spec, new in zip(specs, news[::-1], strict=True):",
    ),
    (
        "running_stats",
        "first dtype only",
        "for index, group in enumerate(groups):",
        "for index, group in enumerate(groups[:1]):",
    ),
    (
        "running_stats",
        "own statistics",
        "graph.write_state(spec.name, new)",
        "graph.write_state(spec.name, graph.add_state(spec))",
    ),
    # rewrite
    (
        "rewrite",
        "inlines backwards",
        "args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)",
        "args, kwargs = fx.map_arg((node.args[::-1], node.kwargs), env.__getitem__)",
    ),
    (
        "rewrite",
        "keyword arguments dropped",
        "graph.graph.create_node(node.op, node.target, args, kwargs,",
        "graph.graph.create_node(node.op, node.target, args, {},",
    ),
    ("rewrite", "no fake values", '("val", "tensor_meta")', '("tensor_meta",)'),
    (
        "rewrite",
        "arguments told apart by value",
        "values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]",
        "pass",
    ),
    (
        "rewrite",
        "behind the node",
        "graph.graph.inserting_before(before)",
        "graph.graph.inserting_after(before)",
    ),
    ("rewrite", "stays tolerant", "mode.allow_non_fake_inputs = before", "pass"),
    ("rewrite", "constants go through", "if not isinstance(value, fx.GraphModule):", "if False:"),
    (
        "rewrite",
        "branches overwrite each other",
        "while hasattr(graph.module, attribute):",
        "while False:",
    ),
    ("rewrite", "first frame", "frames[-1].split", "frames[0].split"),
    # variants
    ("variants", "pending not added", "graph.set_output(gradient.index, total)", "pass"),
    ("variants", "pending subtracted", "        torch.add,\n", "        torch.sub,\n"),
    ("variants", "empty gradients too", 'if gradient.node.meta["val"].numel():', "if True:"),
    ("variants", "in every mode", "if variant.mode == TOTAL:", "if True:"),
    ("variants", "never", "if variant.mode == TOTAL:", "if False:"),
    (
        "variants",
        "absent ones are outputs",
        'Role("gradient", spec.parameter)',
        'Role("output", spec.parameter)',
    ),
    ("variants", "totals at the end", "graph.behind(gradient.node),", "graph.output_node,"),
    ("variants", "twice the pending", "        torch.add,\n", "        lambda a, b: a + b + b,\n"),
    (
        "variants",
        "buffers of the union ignored",
        'graph.module.meta["written_buffers"] = variant.buffers',
        "pass",
    ),
)

_SORTED_READERS = (
    "gradient_sync:67 keyword: sorted(outward & flat.users.keys(), key=order.__getitem__) "
    "-> sorted(outward & flat.users.keys())"
)
EQUIVALENT: dict[str, str] = {
    "gradient_sync by hand: buckets backwards": "a launch stands behind its own bucket",
    "rewrite:136 constant: '_' -> '_x'": "how a branch is called in the module",
    _SORTED_READERS: "torch compares nodes by their place in the graph",
}
