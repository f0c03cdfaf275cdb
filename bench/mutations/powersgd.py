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
_ANY_BEGINNING = "where the iteration begins: any numbers do that are no multiples of each other"
EQUIVALENT: dict[str, str] = {
    "operator: noise.uniform(noise.key_of(0), positions) - 0.5 "
    "-> noise.uniform(noise.key_of(0), positions) + 0.5": _ANY_BEGINNING,
    "arguments: noise.uniform(noise.key_of(0), positions) "
    "-> noise.uniform(positions, noise.key_of(0))": _ANY_BEGINNING,
    "constant: 0 -> 1, in noise.key_of(0)": _ANY_BEGINNING,
    "branch: rest.split([o.numel() for o in others]) if others else () "
    "-> rest.split([o.numel() for o in others])": "nothing is split into nothing",
}
