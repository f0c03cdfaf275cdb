"""Mutants of `fxpasses.passes.check_payloads`: see `bench.mutations`."""

WRITTEN = (
    ("seal behind the launch", "        launch.replace_input_with(payload, sealed)\n", ""),
    ("roundings of the sums left out", " + units[1] * (2 * CHUNK + self.world)", ""),
    ("roundings on the wire left out", "units[0] * self.world + ", ""),
    (
        "wrong scale of the sums",
        'C10D.all_reduce(_sums(x), "sum", self.group)',
        'C10D.all_reduce(_sums(x) * 2, "sum", self.group)',
    ),
    ("dropped wait", "_differ(x, C10D.wait_tensor(sums), rounding)", "_differ(x, sums, rounding)"),
    ("one chunk has to differ in all", "~(agrees | unusual).all()", "~(agrees | unusual).any()"),
    ("signs cancel", "chunks.abs().sum(1)", "chunks.sum(1)"),
    (
        "last elements left out",
        "short = -payload.numel() % CHUNK",
        "short = -payload.numel() % CHUNK; wide[-1:] = 0",
    ),
)
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
