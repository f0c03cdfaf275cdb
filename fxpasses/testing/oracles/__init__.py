"""What has to hold of every pass, as functions that look at a run of it."""

from fxpasses.testing.oracles.base import Oracle, OracleFailure, Run, run_pass, structure
from fxpasses.testing.oracles.kept import (
    dump_reads_back,
    effects_survive,
    memory_kept,
    no_dead_code,
)
from fxpasses.testing.oracles.numerics import (
    idempotent,
    orders_agree,
    reduced_numerically,
    results_right,
    sizes_vary,
)
from fxpasses.testing.oracles.rules import (
    collectives_explained,
    fakes_true,
    report_honest,
    rules_hold,
    same_on_all_ranks,
    signature_kept,
    state_sound,
)

# In the order in which they run: the first that fails is the one that is told.
ORACLES: tuple[Oracle, ...] = (
    rules_hold,
    signature_kept,
    report_honest,
    same_on_all_ranks,
    collectives_explained,
    state_sound,
    results_right,
    sizes_vary,
    fakes_true,
    reduced_numerically,
    effects_survive,
    no_dead_code,
    memory_kept,
    dump_reads_back,
    idempotent,
)

__all__ = [
    "ORACLES",
    "Oracle",
    "OracleFailure",
    "Run",
    "orders_agree",
    "run_pass",
    "structure",
    *(oracle.__name__ for oracle in ORACLES),
]
