"""Mutants of `fxpasses.passes.bucketing`: see `bench.mutations`."""

WRITTEN = (
    (
        "gradients in output order",
        "order = {g.index: (positions[g.node], g.index)",
        "order = {g.index: (g.index, g.index)",
    ),
    (
        "buckets of mixed dtypes",
        "key = (value.dtype, value.device,",
        "key = (torch.float32, value.device,",
    ),
    ("never closes", "if filled[key] >= bucket_bytes:", "if False:"),
    ("counts elements for bytes", "value.numel() * value.element_size()", "value.numel()"),
    ("forgets what is left open", "groups += open_groups.values()", "pass"),
    ("size is not reset", "            del filled[key]\n", ""),
    ("empty gradients in buckets", "        if value.numel() == 0:\n            continue\n", ""),
    (
        "skips 0-dim gradients",
        "if value.numel() == 0:",
        "if value.dim() == 0 or value.numel() == 0:",
    ),
    (
        "always logical order",
        "physical = tuple(sorted(logical, key=value.stride, reverse=True))",
        "physical = logical",
    ),
    ("reversed physical order", "key=value.stride, reverse=True", "key=value.stride"),
    (
        "does not check density",
        "return physical if value.permute(physical).is_contiguous() else logical",
        "return physical",
    ),
    (
        "views not permuted back",
        "return _permute(flat.view([shape[d] for d in permutation]), inverse)",
        "return flat.view(shape)",
    ),
    (
        "inverse is the permutation",
        "return _permute(flat.view([shape[d] for d in permutation]), inverse)",
        "return _permute(flat.view([shape[d] for d in permutation]), permutation)",
    ),
    (
        "buckets at the end",
        "places = [graph.behind(group[-1].node) for group in groups]",
        "places = [graph.output_node for _ in groups]",
    ),
    (
        "views right behind the bucket",
        "            graph.output_node,\n            lambda x: [",
        "            flat.next,\n            lambda x: [",
    ),
    (
        "views in another order",
        "zip(group, views, strict=True)",
        "zip(group, views[::-1], strict=True)",
    ),
    (
        "one view is missing",
        "graph.set_outputs(views)",
        "graph.set_outputs(dict(list(views.items())[1:]))",
    ),
    (
        "off by one group",
        "places = [graph.behind(group[-1].node) for",
        "groups = groups[1:]; places = [graph.behind(group[-1].node) for",
    ),
    (
        "parameters in another order",
        "parameters = tuple(g.parameter for g in group)",
        "parameters = tuple(sorted(g.parameter for g in group))[::-1]",
    ),
    ("layout ignored", "if layout is not None:\n        order", "if False:\n        order"),
    ("MiB are MB", "self.mb * 2**20", "self.mb * 10**6"),
    (
        "behind the first gradient",
        "places = [graph.behind(group[-1].node)",
        "places = [graph.behind(group[0].node)",
    ),
    (
        "buckets numbered from one",
        'flat.meta["bucket"] = Bucket(index,',
        'flat.meta["bucket"] = Bucket(index + 1,',
    ),
    (
        "a clone too many",
        "return _permute(value, permutation).reshape(-1)",
        "return _permute(value, permutation).clone().reshape(-1)",
    ),
)
EQUIVALENT: dict[str, str] = {
    "constant: 0 -> 1, in (layout.index(g.parameter), 0)": "the same number beside each place",
}
