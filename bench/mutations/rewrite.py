"""Mutants of `fxpasses.rewrite`: see `bench.mutations`."""

WRITTEN = (
    (
        "inlines backwards",
        "args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)",
        "args, kwargs = fx.map_arg((node.args[::-1], node.kwargs), env.__getitem__)",
    ),
    (
        "keyword arguments dropped",
        "graph.graph.create_node(node.op, node.target, args, kwargs,",
        "graph.graph.create_node(node.op, node.target, args, {},",
    ),
    ("no fake values", '("val", "tensor_meta")', '("tensor_meta",)'),
    (
        "arguments told apart by value",
        "values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]",
        "pass",
    ),
    (
        "behind the node",
        "graph.graph.inserting_before(before)",
        "graph.graph.inserting_after(before)",
    ),
    ("stays tolerant", "mode.allow_non_fake_inputs = before", "pass"),
    ("constants go through", "if not isinstance(value, fx.GraphModule):", "if False:"),
    ("branches overwrite each other", "while hasattr(graph.module, attribute):", "while False:"),
    ("first frame", "frames[-1].split", "frames[0].split"),
)
EQUIVALENT: dict[str, str] = {
    "constant: '_' -> '_x', in attribute += '_'": "how a branch is called in the module",
    "arguments: pytree.tree_unflatten(filled, structure) "
    "-> pytree.tree_unflatten(structure, filled)": "torch takes either order",
    "constant: True -> False, in _disable_torch_fn_metadata_mode=True": (
        "notes that are not taken over are not made"
    ),
}
