"""Mutants of `fxpasses.passes.clip_norm`: see `bench.mutations`."""

WRITTEN = (
    ("no limit", ".clamp(0.0, 1.0)", ".clamp(0.0, 1e9)"),
    ("first norm only", "if len(norms) > 1 else norms[0]", "if False else norms[0]"),
    ("sum of norms", "torch.linalg.vector_norm(torch.stack(norms))", "torch.stack(norms).sum()"),
    ("steps on what is not finite", "single - single)", "factor)"),
    ("norm not written", "graph.write_state(norm.name, measured)", "pass"),
    ("multiplies twice", "return (part * factor).to(part.dtype)", "return part * factor * factor"),
)
EQUIVALENT: dict[str, str] = {
    "condition: if len(node.all_input_nodes) != 1: return False -> if False: return False": (
        "no view has two inputs but one of a size that is not known, which no parameter has"
    ),
    "keyword: sorted(set(part.views), key=order.__getitem__) -> sorted(set(part.views))": (
        "torch compares nodes by their place in the graph"
    ),
    "branch: torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else no "
    "-> torch.linalg.vector_norm(torch.stack(norms))": "the norm of one norm is that norm",
    "comparison: part.dtype.itemsize < 4 -> part.dtype.itemsize <= 4": "fp32 stays fp32",
    "constant: 4 -> 5, in part.dtype.itemsize < 4": "fp32 stays fp32",
    "comparison: len(norms) > 1 -> len(norms) >= 1": "the norm of one norm is that norm",
}
KNOWN = {
    "constant: 'reduced_bucket' -> 'reduced_bucketx', in 'reduced_bucket' not in node.meta": (
        "a reduced bucket that is a view itself comes of compression, behind which this is not tried"
    ),
}
