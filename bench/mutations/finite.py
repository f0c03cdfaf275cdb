"""Mutants of `fxpasses.finite`: see `bench.mutations`."""

WRITTEN = (
    (
        "infinity goes through",
        "if x.is_complex() else x.isfinite()",
        "if x.is_complex() else ~x.isnan()",
    ),
    (
        "what is no number goes through",
        "if x.is_complex() else x.isfinite()",
        "if x.is_complex() else ~x.isinf()",
    ),
    (
        "either part of a complex number",
        "x.real.isfinite() & x.imag.isfinite()",
        "x.real.isfinite() | x.imag.isfinite()",
    ),
    (
        "the real part alone",
        "x.real.isfinite() & x.imag.isfinite()",
        "x.real.isfinite()",
    ),
    (
        "complex numbers as torch has it",
        "x.real.isfinite() & x.imag.isfinite() if x.is_complex() else x.isfinite()",
        "x.isfinite()",
    ),
    (
        "complex numbers missed",
        "x.is_floating_point() or x.is_complex()",
        "x.is_floating_point()",
    ),
    (
        "real numbers missed",
        "x.is_floating_point() or x.is_complex()",
        "x.is_complex()",
    ),
)
EQUIVALENT: dict[str, str] = {}
