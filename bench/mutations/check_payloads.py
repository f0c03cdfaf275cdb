"""Mutants of `fxpasses.passes.check_payloads`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
EQUIVALENT: dict[str, str] = {}
_BOTH_EQUAL = "two sums that were rounded would have to be exactly as far apart as they may be"
KNOWN = {
    "comparison: (found - expected).abs() <= rounding * size + torch.finfo(result.dtype -> "
    "(found - expected).abs() < rounding * size + torch.finfo(result.dtype)": _BOTH_EQUAL,
    "comparison: size < torch.finfo(result.dtype).max -> size <= torch.finfo(result.dtype).max": _BOTH_EQUAL,
}
