"""Mutants of `fxpasses.exchange`: see `bench.mutations`."""

WRITTEN = (
    ("what an owner loses is lost", 'kept["lost_as_owner"])', "None)"),
    ("never rounds anew", "(*news, olds[-1] + 1)", "(*news, olds[-1])"),
    (
        "all buckets have one scale",
        "for name, shape in self.parameters)",
        "for name, shape in self.parameters[:1])",
    ),
)
_OTHER_SEEDS = "other seeds, of which no two are the same either"
EQUIVALENT: dict[str, str] = {
    "constant: 1 -> 2, in :1": "of what is decoded all elements are finite, or none",
    "condition: if lost is not None: lost = self.codec.residual(lost, kept['lost_as_ow "
    "-> if True: lost = self.codec.residual(lost, kept['lost_as_owner'])": (
        "where nothing is kept there is nothing to add to"
    ),
}
KNOWN = {
    "operator: (olds[-1] * self.codec.world + self.codec.rank) * 2 ** 20 + (2 * self. "
    "-> (olds[-1] * self.codec.world + self.codec.rank) * 2 ** 20 - (2 * self.": _OTHER_SEEDS,
    "operator: olds[-1] * self.codec.world + self.codec.rank "
    "-> olds[-1] * self.codec.world - self.codec.rank": _OTHER_SEEDS,
    "constant: 2 -> 3, in 2 ** 20": _OTHER_SEEDS,
    "constant: 20 -> 21, in 2 ** 20": _OTHER_SEEDS,
    "operator: 2 * self.index + leg -> 2 * self.index - leg": _OTHER_SEEDS,
    "constant: 2 -> 3, in 2 * self.index": _OTHER_SEEDS,
}
