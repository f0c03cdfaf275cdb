"""Mutants of `fxpasses.guards.sums`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
EQUIVALENT: dict[str, str] = {}
_NO_OTHER = "torch's decompositions write no other form of it"
KNOWN = {
    "condition: if not _is_zero(start) or len(indices) != 1 or node.meta['val'].dim()  -> "
    "if False: return None": _NO_OTHER,
    "operator: not _is_zero(start) or len(indices) != 1 or node.meta['val'].dim() != -> "
    "not _is_zero(start) and len(indices) != 1 and (node.meta['val'].dim() ": _NO_OTHER,
}
