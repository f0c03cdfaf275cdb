"""Mutants of `fxpasses.passes.cast`: see `bench.mutations`."""

WRITTEN = (
    ("wrong low dtype", "low = DTYPES[self.dtype]", "low = torch.bfloat16"),
    (
        "rules ignored",
        '_lowered(graph, low, parse_rules(self.rules or ""))',
        "_lowered(graph, low, ())",
    ),
    (
        "outputs stay low",
        "elif not is_cast(node):",
        'elif not is_cast(node) and node.op != "output":',
    ),
    ("operators stay low", "elif not is_cast(node):", 'elif node.op == "output":'),
    ("no cast back", "node.replace_input_with(source, self._cast(source, torch.float32))", "pass"),
    (
        "cast back to double",
        "self._cast(source, torch.float32))",
        "self._cast(source, torch.float64))",
    ),
    (
        "cast to the other low dtype",
        "self._cast(source, self._low))",
        "self._cast(source, torch.float16 if self._low == torch.bfloat16 else torch.bfloat16))",
    ),
    (
        "cast on the edge of another operator",
        "node.replace_input_with(source, self._cast(source, self._low))",
        "self._graph.behind(node).replace_input_with(source, self._cast(source, self._low))",
    ),
    (
        "all readers get the cast",
        "node.replace_input_with(source, self._cast(source, self._low))",
        "[u.replace_input_with(source, self._cast(source, self._low)) for u in list(source.users)]",
    ),
    ("statistics are cast", " and source not in kept and", " and"),
    ("one cast for each reader", "if (source, dtype) not in self._made:", "if True:"),
    (
        "cast far behind the value",
        "            self._graph.behind(source),",
        "            self._graph.output_node,",
    ),
    (
        "first input only",
        "        for source in node.all_input_nodes:\n            if _dtype(source) == torch.float32 and",
        "        for source in node.all_input_nodes[:1]:\n            if _dtype(source) == torch.float32 and",
    ),
    ("fake values as they were", "if recompute(self._graph, node):", "if False:"),
    ("masks cast as values", "source.all_input_nodes[0] if mask else source", "source"),
    (
        "numbers cast as values",
        "constant, mask = _is_constant(source, dtype), _is_mask(source)",
        "constant, mask = False, _is_mask(source)",
    ),
    (
        "another number",
        "torch.full(x.shape, _value(source),",
        "torch.full(x.shape, 2 * _value(source),",
    ),
    ("region that says no is lowered", 'custom.get("precision") == "keep" or ', ""),
    (
        "explicit fp32 is lowered",
        '(custom.get("precision") == "explicit" or not _fits(node, low))',
        "not _fits(node, low)",
    ),
    (
        "large numbers in low",
        '(custom.get("precision") == "explicit" or not _fits(node, low))',
        'custom.get("precision") == "explicit"',
    ),
    (
        "other dtypes are lowered",
        " or _has_effect(node) or _dtype(node) != torch.float32:",
        " or _has_effect(node):",
    ),
    (
        "denied operators follow",
        "kind in (INFER, CLEAR) and _follows",
        "kind in (INFER, CLEAR, DENY) and _follows",
    ),
    (
        "products stay fp32",
        "if kind == ALLOW or (kind in",
        "if (kind in (ALLOW,) and False) or (kind in",
    ),
    (
        "elementwise code stays fp32",
        "kind in (INFER, CLEAR) and _follows",
        "kind in (CLEAR,) and _follows",
    ),
    (
        "one low input is enough",
        "return bool(values) and all(n in lowered",
        "return bool(values) and any(n in lowered",
    ),
    ("masks count as values", " and not _comes_from_mask(n)]", "]"),
    (
        "what only leads to fp32 is lowered",
        "                    lowered -= {node, *_parts(node, lowered)}",
        "                    pass",
    ),
    (
        "parts are cast one by one",
        "return {*moves, *parts} if len(parts) + direct > 1 else set()",
        "return set()",
    ),
    (
        "moved values are cast behind",
        "if _is_cast_anyway(node, late | lowered, lowered, rounded, low):",
        "if False:",
    ),
    ("looks once for what is idle", "while count != len(lowered):", "while count is None:"),
    (
        "streams are rounded",
        "may_be_read_low = operator_name(node) in COMMUTES and node in rounded",
        "may_be_read_low = operator_name(node) in COMMUTES",
    ),
    (
        "low in every sum",
        "if (name in PROMOTES and _promotes(node, sources)) or (",
        "if name in PROMOTES or (",
    ),
    ("sums are given casts", "if (name in PROMOTES and _promotes(node, sources)) or (", "if ("),
    (
        "compares rounded numbers",
        "return exact and operator_name(node) in COMPARES",
        "return operator_name(node) in COMPARES",
    ),
    (
        "comparisons are given casts",
        "_compares_exactly(node, low) and all(_dtype(n) == low for n in node.all_input_nodes)",
        "False",
    ),
    ("casts of masks are counted", "self.count += not (constant or mask)", "self.count += 1"),
    ("numbers lose their dimensions", "torch.full(x.shape, ", "torch.full((), "),
    (
        "says it changed nothing",
        'return Report(True, {"lowered"',
        'return Report(False, {"lowered"',
    ),
)
EQUIVALENT: dict[str, str] = {
    "constant: 0 -> 1, in default=0": "where no low value is read there is nothing to cast",
}
