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
EQUIVALENT: dict[str, str] = {}
