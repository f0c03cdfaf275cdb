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
EQUIVALENT: dict[str, str] = {}
