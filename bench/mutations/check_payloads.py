"""Mutants of `fxpasses.passes.check_payloads`: see `bench.mutations`."""

WRITTEN: tuple[tuple[str, str, str], ...] = ()
EQUIVALENT: dict[str, str] = {}
_BOTH_EQUAL = "two sums that were rounded would have to be exactly as far apart as they may be"
_UNREAD = "whose bucket a payload is nobody of ours asks once it has been sent"
_A_BOUND = "a bound that is so little larger or smaller is one still"
KNOWN = {
    "comparison: (found - expected).abs() <= rounding * size + torch.finfo(result.dtype -> "
    "(found - expected).abs() < rounding * size + torch.finfo(result.dtype)": _BOTH_EQUAL,
    "comparison: size < torch.finfo(result.dtype).max -> size <= torch.finfo(result.dtype).max": _BOTH_EQUAL,
    "condition: if 'bucket' in payload.meta: sealed.meta['bucket'] = payload.meta['buc -> "
    "if False: sealed.meta['bucket'] = payload.meta['bucket']": _UNREAD,
    "constant: 'bucket' -> 'bucketx', in 'bucket' in payload.meta": _UNREAD,
    "constant: 'bucket' -> 'bucketx', in sealed.meta['bucket']": _UNREAD,
    "constant: 2 -> 3, in torch.finfo(dtype).eps / 2": _A_BOUND,
    "operator: 2 * CHUNK + self.world -> 2 * CHUNK - self.world": _A_BOUND,
    "operator: 2 * CHUNK -> 2 + CHUNK": _A_BOUND,
    "constant: 2 -> 3, in 2 * CHUNK": _A_BOUND,
}
