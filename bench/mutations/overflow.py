"""Mutants of `fxpasses.passes.overflow`: see `bench.mutations`."""

WRITTEN = (
    ("flag is not written", "graph.write_state(spec.name, flag)", "pass"),
    ("all for any", ".any().float() for x in xs", ".all().float() for x in xs"),
    ("every gradient has to", "]).amax(),", "]).amin(),"),
    ("flag does not stay", "[old, *((~", "[old * 0, *((~"),
    ("flag counts", "]).amax(),", "]).sum(),"),
    ("finite ones set it", "(~is_finite(x)).any()", "is_finite(x).any()"),
    ("first bucket missed", "nodes = list(checked)", "nodes = list(checked)[1:] or list(checked)"),
    ("last bucket missed", "nodes = list(checked)", "nodes = list(checked)[:-1] or list(checked)"),
    ("gradients that are not finite missed", "bool(value.numel()) and is_inexact(value)", "False"),
    (
        "each gradient of a bucket",
        "dict.fromkeys(_whole(g.node) for g",
        "dict.fromkeys(g.node for g",
    ),
    ("buckets in place of what is made of them", " or class_of(source) != CLEAR:", ":"),
    ("0-dim gradients missed", "return bool(value.numel()) and", "return bool(value.dim()) and"),
    (
        "state in double",
        'StateSpec(OVERFLOW_STATE, "", (), torch.float32,',
        'StateSpec(OVERFLOW_STATE, "", (), torch.float64,',
    ),
    (
        "flag set already at first",
        "            graph.add_state(spec),",
        "            graph.add_state(spec) if False else nodes[0],",
    ),
    (
        "provenance missing",
        'provenance=Provenance(self.name, "check")',
        'provenance=Provenance("", "check")',
    ),
)
EQUIVALENT: dict[str, str] = {}
