"""Option `schedule="auto"`: how large buckets are, and which of them are compressed.

Each candidate is tried: its passes run over a copy of the graph, and the step is predicted from what they made.
A bucket whose time on the wire is hidden anyway need not be encoded; one that is may be smaller or larger than
`bucket_mb`. The options are never exceeded the other way: what they don't compress stays as it is.

Every rank tries the same candidates on the same graph. Where graphs differ (other shapes of a batch, say) the
choice may too: the ranks see that from their plans, and send buckets of `bucket_mb` as the options say.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpasses.compression import Scheme, adapts, parse_rules, rules_text
from fxpasses.config import Hardening
from fxpasses.graph import TrainingGraph, copied
from fxpasses.patterns import exactly
from fxpasses.pipeline import Pipeline
from fxpasses.schedule.build import Program, build
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.tasks import LINK, in_order, queued

# Multiples of `bucket_mb`; the first wins where all are alike.
_SIZES = (1.0, 0.5, 0.25, 0.125, 2.0, 4.0)
_WORTH_IT = 2e-3  # of the step, to prefer a later candidate


def choose(pipeline: Pipeline, graph: TrainingGraph, hardening: Hardening, world: int) -> Pipeline:
    """The pipeline with which a backward takes the shortest time, by the cost model.

    Args:
        pipeline: bound; as it is returned unless the options leave a choice.
        graph: as the passes will find it; stays as it is.
    """
    if hardening.schedule != "auto" or hardening.passes is not None or world == 1:
        return pipeline
    machine = Machine.parse(hardening.machine)
    best, seconds, program = pipeline, *_tried(pipeline, graph, machine, world)
    for size in _SIZES[1:]:
        candidate = pipeline.replaced(bucket_mb=size * hardening.bucket_mb)
        found, tasks = _tried(candidate, graph, machine, world)
        if found < seconds * (1 - _WORTH_IT):
            best, seconds, program = candidate, found, tasks
    for rules in _less_compressed(str(hardening.compression), program):
        candidate = best.replaced(compression=rules)
        found, _ = _tried(candidate, graph, machine, world)
        if found < seconds * (1 - _WORTH_IT):
            best, seconds = candidate, found
    return best


def _tried(
    pipeline: Pipeline, graph: TrainingGraph, machine: Machine, world: int
) -> tuple[float, Program]:
    copy = TrainingGraph(copied(graph.module), graph.decompositions)
    pipeline.run("backward", copy, local=False)
    program = build(copy, machine, world)
    return queued(program.tasks, in_order(program.tasks)).makespan, program


def _less_compressed(compression: str, program: Program) -> Iterator[str]:
    """Option `compression` without the first bucket, the first two, the first four, …; levels that change from
    step to step are left to themselves.
    """
    if not compression or adapts(compression):
        return
    buckets = list(dict.fromkeys(w.bucket for w in program.works if w.kind == LINK and w.bucket))
    rules, count = parse_rules(compression), 1
    while count < len(buckets):
        names = [name for bucket in buckets[:count] for name in bucket]
        yield rules_text((*rules, *((exactly(name), Scheme()) for name in names)))
        count *= 2
