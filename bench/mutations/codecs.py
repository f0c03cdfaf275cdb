"""Mutants of `fxpasses.codecs`: see `bench.mutations`."""

WRITTEN = (
    ("shares are not weighed", "self.world * lost", "lost"),
    (
        "another rank's shard",
        "self.rank * self.layout.shard_numel",
        "(self.rank + 1) % self.world * self.layout.shard_numel",
    ),
    ("two legs from four on", "_TWO_LEGS_FROM = 3", "_TWO_LEGS_FROM = 4"),
    (
        "decodes the first layout",
        "self.second_layout if self.legs == 2 else self.layout",
        "self.layout",
    ),
    (
        "forgets residuals",
        "quantise(flat, residual, seed, *self.layout.fields)",
        "quantise(flat, residual * 0, seed, *self.layout.fields)",
    ),
)
_NOBODY_READS = "nobody reads what is lost where nothing is kept"
EQUIVALENT: dict[str, str] = {
    "branch: scheme.second_bits if scheme.scheme == 'int4' else scheme.bits -> scheme.second_bits": (
        "int8 can't be told another number than 8"
    ),
    "arguments: torch.ops.fxpasses.topk_encode(flat, old, *self.layout.fields) "
    "-> torch.ops.fxpasses.topk_encode(old, flat, *self.layout.fields)": "it encodes their sum",
    "branch: lost if feedback else None -> lost": _NOBODY_READS,
    "operator: self.world - 1 -> self.world + 1": "more is padded, as much on every rank, and cut off",
}
_NOT_SO_NEAR = "nothing that is drawn comes so near to the bound"
KNOWN = {
    "branch: None if residual is None else new -> new": _NOBODY_READS,
    "operator: 1 + 2.0 ** (-7) + 2.0 ** (-15) -> 1 + 2.0 ** (-7) - 2.0 ** (-15)": _NOT_SO_NEAR,
    "constant: 15 -> 16, in 2.0 ** (-15)": _NOT_SO_NEAR,
}
