"""Mutants of `fxpasses.feedback`: see `bench.mutations`."""

WRITTEN = (
    (
        "residual forgotten",
        "        return flat, olds[0]\n",
        "        return flat, torch.zeros_like(flat)\n",
    ),
    ("residual kept as it was", "        return (lost,)\n", "        return (olds[0],)\n"),
    ("estimate of this rank only", "return olds[1] + mean", "return olds[0] + mean"),
    ("estimate not moved", "return average - lost, result,", "return olds[0], result,"),
)
EQUIVALENT: dict[str, str] = {}
