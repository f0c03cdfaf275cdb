"""Mutants of `fxpasses.guards.sums`: see `bench.mutations`."""

WRITTEN = (
    ("narrow accumulator", "accumulator=accumulator or c.dtype", "accumulator=torch.float64"),
    ("padding counts", "indices.ne(padding)", "indices.ne(-1)"),
    ("mean left out", "before.to(WIDE) - mean", "before.to(WIDE)"),
    (
        "kept dimensions left where they are",
        "order = [*kept, *sorted(dims)]",
        "order = [*sorted(dims), *kept]",
    ),
    (
        "views are not looked through",
        '        while node.op == "call_function" and _is_view(node):\n',
        "        while False:\n",
    ),
)
EQUIVALENT = {
    "arguments: x.transpose(0, 1) -> x.transpose(1, 0)": "the same dimensions",
}
_NO_OTHER = "torch's decompositions write no other form of it"
_EITHER_WAY = "the bound is of one size either way, and plain sums alone are held to it exactly"
_EXCHANGED = {
    "c.reshape(-1, 1), x.reshape(-1, c.numel()).mT": "x.reshape(-1, c.numel()).mT, c.reshape(-1, 1)",
    "c.reshape(-1, 1), x.transpose(0, 1).flatten(1)": "x.transpose(0, 1).flatten(1), c.reshape(-1, 1)",
    "c.mT, kept.reshape(-1, c.shape[-1]).mT": "kept.reshape(-1, c.shape[-1]).mT, c.mT",
    "c.mT, torch.where(mask, x, 0).reshape(-1, c.shape[-1]).mT": (
        "torch.where(mask, x, 0).reshape(-1, c.shape[-1]).mT, c.mT"
    ),
}
KNOWN = {
    **{
        f"arguments: _differ({given}) -> _differ({exchanged})": _EITHER_WAY
        for given, exchanged in _EXCHANGED.items()
    },
    "operator: isinstance(node, fx.Node) and operator_name(node) == 'full' and (not n -> "
    "isinstance(node, fx.Node) or operator_name(node) == 'full' or (not nod": _NO_OTHER,
    "condition: if not _is_zero(start) or len(indices) != 1 or node.meta['val'].dim()  -> "
    "if False: return None": _NO_OTHER,
    "operator: not _is_zero(start) or len(indices) != 1 or node.meta['val'].dim() !=  -> "
    "not _is_zero(start) and len(indices) != 1 and (node.meta['val'].dim()": _NO_OTHER,
}
