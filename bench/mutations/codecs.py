"""Mutants of `fxpasses.codecs`: see `bench.mutations`."""

WRITTEN = (
    ("shares are not weighed", "self.world * lost", "lost"),
    (
        "another rank's shard",
        "start, end = self.rank * size",
        "start, end = (self.rank + 1) % self.world * size",
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
