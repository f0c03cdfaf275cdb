"""Mutants of `fxpasses.passes.clip_norm`: see `bench.mutations`."""

WRITTEN = (
    ("no limit", ".clamp(0.0, 1.0)", ".clamp(0.0, 1e9)"),
    ("first norm only", "if len(norms) > 1 else norms[0]", "if False else norms[0]"),
    ("sum of norms", "torch.linalg.vector_norm(torch.stack(norms))", "torch.stack(norms).sum()"),
    ("steps on what is not finite", "single - single)", "factor)"),
    ("norm not written", "graph.write_state(norm.name, measured)", "pass"),
    ("multiplies twice", "return (part * factor).to(part.dtype)", "return part * factor * factor"),
)
EQUIVALENT: dict[str, str] = {}
