"""Mutants of `fxpasses.reduction`: see `bench.mutations`."""

WRITTEN = (
    (
        "no wait",
        "arrived = torch.ops._c10d_functional.wait_tensor(arrived)",
        "arrived = arrived.clone()",
    ),
    ("no division", "part.to(wide) / self.world", "part.to(wide)"),
    ("divides for the sum", 'self.reduce == "mean" and self.world > 1', "self.world > 1"),
    ("divides by one less", "part.to(wide) / self.world", "part.to(wide) / (self.world - 1)"),
    ("divides behind the cast", "part.to(wide) / self.world", "part.to(wire) / self.world"),
    ("divides twice", "part.to(wide) / self.world", "part.to(wide) / self.world / self.world"),
    ("reduces by avg", 'all_reduce(whole, "sum", self', 'all_reduce(whole, "avg", self'),
    ("reduces by max", 'all_reduce(whole, "sum", self', 'all_reduce(whole, "max", self'),
    ("another group", '"sum", self.group)', '"sum", "0")'),
    ("wire dtype ignored", "wire = DTYPES[self.dtype] if self.dtype else own", "wire = own"),
    (
        "result left in the wire dtype",
        "arrived[:numel]).to(bucket.dtype)",
        "arrived[:numel]).to(torch.float32)",
    ),
    (
        "launches late",
        'bucket.write(graph, bucket.flat.next, "launch"',
        'bucket.write(graph, graph.output_node, "launch"',
    ),
    ("reads the local bucket", "reader.replace_input_with(self.flat, result)", "pass"),
    ("launch not marked", 'launch.meta["reduces"] = True', "pass"),
    ("payload forgets its bucket", 'payload.meta["bucket"] = self.flat.meta["bucket"]', "pass"),
    ("leaves the old bucket", "graph.graph.erase_node(self.flat)", "pass"),
    (
        "parts swapped",
        "self._share(part, bucket.dtype) for part in parts]",
        "self._share(part, bucket.dtype) for part in parts[::-1]]",
    ),
    (
        "first part only",
        "self._share(part, bucket.dtype) for part in parts]",
        "self._share(part, bucket.dtype) for part in parts[:1]]",
    ),
    ("bytes counts elements", ".numel() * value.element_size()", ".numel()"),
    (
        "provenance without parameters",
        "bucket.model_line, bucket.parameters\n",
        "bucket.model_line\n",
    ),
    ("scales in half precision", "part.to(wide) / self.world", "part.half() / self.world"),
    (
        "sends twice",
        "        if self.legs == 1:\n            bucket.mark_launch(node)",
        "        if self.legs == 1:\n"
        "            bucket.mark_launch(node)\n"
        '            again = bucket.write(graph, node.next, "launch", lambda x: '
        'torch.ops._c10d_functional.all_reduce(x, "sum", self.group), node.args[0])\n'
        "            bucket.mark_launch(again)",
    ),
    ("adds the ranks backwards", "rows.unbind())", "rows.unbind()[::-1])"),
    ("adds all but one rank", "rows.unbind())", "rows.unbind()[1:])"),
    ("adds up in the wire's dtype", "view(self.world, -1).to(wide)", "view(self.world, -1)"),
    (
        "shards one too short",
        "shard = -(-whole.numel() // self.world)",
        "shard = whole.numel() // self.world",
    ),
    ("keeps the padding", "arrived[:numel])", "arrived)"),
    ("two legs for two ranks", "self.order == FIXED and self.world > 2", "self.order == FIXED"),
    ("never two legs", "return 2 if self.order == FIXED and self.world > 2 else 1", "return 1"),
    (
        "second legs behind their own first",
        "(launch.next for launch in launches[1:])",
        "(launch.next for launch in launches[:-1])",
    ),
)
EQUIVALENT: dict[str, str] = {
    "keyword: sorted(outward & flat.users.keys(), key=order.__getitem__) "
    "-> sorted(outward & flat.users.keys())": "torch compares nodes by their place in the graph",
    "branch: arrived if self.legs == 1 else arrived[:numel] -> arrived[:numel]": (
        "in one leg as much arrives as the bucket holds"
    ),
}
