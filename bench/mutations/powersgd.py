"""Mutants of `fxpasses.powersgd`: see `bench.mutations`."""

WRITTEN = (
    ("not orthonormal", "return torch.linalg.qr(matrix).Q", "return matrix"),
    ("the sum of all ranks", "for part in parts]) / self.world", "for part in parts])"),
    ("residual forgotten", "whole = flat + olds[0] if self.feedback else flat", "whole = flat"),
    ("factor transposed", "factors = [m.t() @ basis", "factors = [m.t() @ basis * 2"),
    (
        "always begins anew",
        "torch.where(subspace.any(), subspace,",
        "torch.where(subspace.any() & False, subspace,",
    ),
    ("residual of what was sent", "else torch.zeros_like(sent)", "else whole - sent"),
    ("too much gain wanted", "_LEAST_GAIN = 2 ", "_LEAST_GAIN = 200 "),
)
EQUIVALENT: dict[str, str] = {}
