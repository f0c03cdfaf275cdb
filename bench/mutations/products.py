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
