"""Mutants of `fxpasses.guards.products`: see `bench.mutations`."""

WRITTEN = (
    ("narrow bound", "DEVIATIONS = 8.0", "DEVIATIONS = 0.01"),
    ("wide bound", "DEVIATIONS = 8.0", "DEVIATIONS = 64.0"),
    ("sum of squares for squared sum", "b_sums.square())", "b_sums.abs())"),
    (
        "walk left out",
        "bound = DEVIATIONS * unit * (2 * inner + outer) * walk + drift",
        "bound = drift",
    ),
    ("drift left out", "* walk + drift", "* walk"),
    ("what is added left out", "    if d is not None:\n", "    if False:\n"),
    (
        "what is not finite is right",
        "torch.where(found.isfinite(), agrees, may_overflow)",
        "agrees | ~found.isfinite()",
    ),
    ("one row has to be wrong in all", "may_overflow).all()", "may_overflow).any()"),
)
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
