"""Mutants of `fxpasses.guards.products`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
_EITHER = "the larger or smaller of two is that of the two in any order"
EQUIVALENT = {
    "arguments: torch.minimum(share * outer * sizes.amax(-1), share * sizes.sum(-1)) -> "
    "torch.minimum(share * sizes.sum(-1), share * outer * sizes.amax(-1))": _EITHER,
    "arguments: torch.maximum(norm, share * found.abs()) -> "
    "torch.maximum(share * found.abs(), norm)": _EITHER,
    "arguments: torch.maximum(b_wide.square().sum(-1), b_sums.square()) -> "
    "torch.maximum(b_sums.square(), b_wide.square().sum(-1))": _EITHER,
}
_BOTH_EQUAL = "two sums that were rounded would have to be exactly as far apart as they may be"
_TINY = "makes a difference where all is about as small as numbers of the dtype get"
KNOWN = {
    "comparison: (found - expected).abs() <= bound + tiny -> "
    "(found - expected).abs() < bound + tiny": _BOTH_EQUAL,
    "comparison: inner * walk < torch.finfo(c.dtype).max -> "
    "inner * walk <= torch.finfo(c.dtype).max": _BOTH_EQUAL,
    "constant: 1 -> 2, in c.shape[-1]": _TINY,
    "constant: 1 -> 2, in a.shape[-1]": _TINY,
}
