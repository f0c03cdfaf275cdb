"""The passes in order, checked before anything runs, and one callback that sees each of them.

`Pipeline.run` holds no code of any one pass. Whatever wants to look on (rules, dump, timing) is an
observer: a callable `(previous, next, graph)` that is called before the first pass, between passes and
after the last one. If it has a method `failed`, that is called with what a pass or another observer raised.
"""

from __future__ import annotations

import dataclasses
import time
import typing
from collections.abc import Callable, Sequence
from typing import Any

from fxpasses import bisection
from fxpasses.compression import adapts
from fxpasses.config import ANY, Hardening
from fxpasses.faults.spec import INJECTED_BY, PAYLOAD, check_ranks, parse_faults
from fxpasses.graph import TrainingGraph
from fxpasses.guards.option import parse_guards
from fxpasses.passes.base import STAGES, Pass, Report
from fxpasses.registry import parse_pipeline


@dataclasses.dataclass(frozen=True)
class Done:
    """A pass that ran.

    Attributes:
        report: what it did.
        number: its number in the pipeline, from 1.
        seconds: that it took.
    """

    made_by: Pass
    report: Report
    number: int = 1
    seconds: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True)
class Run:
    """A call of `Pipeline.run`: whose, and with which arguments."""

    pipeline: Pipeline
    stage: str
    local: bool | None


@typing.runtime_checkable
class FailureObserver(typing.Protocol):
    """An observer that wants to know of what was raised."""

    def failed(self, error: Exception, run: Run) -> None: ...


Observer = Callable[[Done | None, Pass | None, TrainingGraph], None]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Passes in order, bound to options and process group."""

    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        _check_contracts(self.passes)

    def stage(self, name: str) -> tuple[Pass, ...]:
        return tuple(p for p in self.passes if p.stage == name)

    def run(
        self,
        stage: str,
        graph: TrainingGraph,
        observers: Sequence[Observer] = (),
        local: bool | None = None,
    ) -> list[Done]:
        """Run the passes of one stage over a graph, in place.

        Args:
            local: only those that run in every backward (True), or only the others (False).
        """
        passes = tuple(p for p in self.stage(stage) if local is None or p.local == local)
        passes = bisection.chosen(passes)
        done: list[Done] = []
        try:
            self._run_each(passes, graph, observers, done)
        except Exception as error:
            for observe in observers:
                if isinstance(observe, FailureObserver):
                    observe.failed(error, Run(self, stage, local))
            raise
        if any(d.report.changed for d in done):
            graph.recompile()
        return done

    def _run_each(
        self,
        passes: Sequence[Pass],
        graph: TrainingGraph,
        observers: Sequence[Observer],
        done: list[Done],
    ) -> None:
        for position in range(len(passes) + 1):
            previous = done[-1] if done else None
            following = passes[position] if position < len(passes) else None
            with bisection.noting_untestable(previous.made_by if previous else None):
                for observe in observers:
                    observe(previous, following, graph)
            if following is not None:
                done.append(self._run(following, graph))

    def _run(self, current: Pass, graph: TrainingGraph) -> Done:
        started = time.perf_counter()
        try:
            report = bisection.run(current, graph)
        except Exception as error:
            error.add_note(f"{_WHILE}{current.spec!r} ran")
            raise
        seconds = time.perf_counter() - started
        return Done(current, report, self.passes.index(current) + 1, seconds)

    def bind(self, **environment: Any) -> Pipeline:
        """The passes with fields that come from the environment filled in."""
        return Pipeline(tuple(p.bind(environment) for p in self.passes))

    def replaced(self, **environment: Any) -> Pipeline:
        """The passes with these fields that come from the environment, whatever they hold."""
        return Pipeline(tuple(p.replaced(environment) for p in self.passes))

    @property
    def spec(self) -> str:
        """The pipeline string."""
        return ",".join(p.spec for p in self.passes)


_WHILE = "while pass "


def made_by_pass(error: BaseException) -> bool:
    """Whether a pass raised it, rather than the program that it ran over."""
    return any(note.startswith(_WHILE) for note in getattr(error, "__notes__", ()))


def build(hardening: Hardening, group: str | None, world: int, rank: int) -> Pipeline:
    """The pipeline that the options ask for.

    Args:
        group: registered name of the process group; None without one.

    Raises:
        ValueError: for an unknown pass or option, a broken contract, or a pipeline that would leave
            gradients unreduced although there are several ranks.
    """
    _check_faults(hardening.faults, world)
    text = _default(hardening, world) if hardening.passes is None else hardening.passes
    pipeline = _bound(text, hardening, group=group, world=world, rank=rank)
    needs_group = next((p.name for p in pipeline.passes if p.communicates), None)
    if group is None and needs_group is not None:
        raise ValueError(
            f"option 'passes': {needs_group!r} communicates, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first, or leave the pass out"
        )
    provided = frozenset().union(*(p.provides for p in pipeline.passes))
    if world > 1 and "reduced" not in provided:
        raise ValueError(
            f"option 'passes': {text!r} reduces no gradient, but there are {world} ranks; add "
            "'participation,running_stats,bucketing,gradient_sync'"
        )
    if world > 1 and hardening.compression and "compressed" not in provided:
        raise ValueError(
            f"option 'compression': {text!r} does not compress; put 'compress' in place of 'gradient_sync'"
        )
    for fault in parse_faults(hardening.faults):
        name = INJECTED_BY.get(fault.phase)
        if name is not None and name not in {p.name for p in pipeline.passes}:
            raise ValueError(
                f"option 'faults': {fault.text!r} needs pass {name!r}; add it to the pipeline"
            )
    for option in ("clip_norm", "watch"):
        if getattr(hardening, option) is not None and "clipped" not in provided:
            raise ValueError(
                f"option {option!r}: nothing measures the norm of the gradients; "
                + (
                    f"put 'clip_norm' behind {text!r}"
                    if hardening.passes
                    else "set option 'clip_norm'"
                )
            )
    return pipeline


def _check_faults(text: str, world: int) -> None:
    check_ranks(text, world)
    for fault in parse_faults(text):
        if fault.phase == PAYLOAD and world == 1:
            raise ValueError(
                f"option 'faults': {fault.text!r}: with one rank nothing is sent; expected another phase"
            )


def on_one_rank(hardening: Hardening) -> Pipeline:
    """Of the passes that the options ask for those that know of no other rank: they work on the joint graph, or
    run in local backwards too.
    """
    text = _default(hardening, 1) if hardening.passes is None else hardening.passes
    passes = _bound(text, hardening).passes
    return Pipeline(tuple(p for p in passes if p.stage == "joint" or p.local))


def _bound(text: str, hardening: Hardening, **group: Any) -> Pipeline:
    options = {f.name: getattr(hardening, f.name) for f in dataclasses.fields(hardening)}
    options["loss_scale_in_graph"] = hardening.loss_scale_in_graph
    options["compression"] = hardening.compression or None
    options["reduce_order"] = None if hardening.reduce_order == ANY else hardening.reduce_order
    return Pipeline(parse_pipeline(text)).bind(**options, **group)


def _default(hardening: Hardening, world: int) -> str:
    exchange = "compress" if hardening.compression else "gradient_sync"
    exchange += "{overlap=false}" if hardening.schedule == "serial" else ""
    precision = ("cast",) if hardening.precision != "fp32" else ()
    scaled, clipped = bool(hardening.loss_scale_in_graph), hardening.clip_norm is not None
    planned = hardening.schedule == "auto" and world > 1
    faults = {INJECTED_BY.get(fault.phase) for fault in parse_faults(hardening.faults)}
    forward, backward, payload = (
        (name,) if name in faults else () for name in ("inject_forward", "inject", "inject_payload")
    )
    guards = parse_guards(hardening.guards)
    lines = (
        *precision,  # first, so that all others see the graph that will run
        *(("check_products",) if guards.products else ()),
        *forward,  # behind all that computes: it strikes what runs
        *(("replay_forward",) if guards.region else ()),  # last on the joint graph: with its faults
        *(("loss_scale",) if scaled else ()),  # before gradients are added up or sent
        *(("check_gradient_products",) if guards.products else ()),
        *(("check_sums", "check_gradients") if guards.gradients else ()),
        *(("check_values",) if guards.values else ()),  # at their own scale
        *backward,  # on what each rank has made, at its own scale
        *(("replay_backward",) if guards.region else ()),  # with its faults, before they are sent
        *((*_SYNCHRONISE, exchange) if world > 1 else ()),
        *(("check_payloads",) if world > 1 and guards.payloads else ()),
        *(("settle_checks",) if world > 1 and guards.gradients else ()),  # behind what is launched
        *payload,  # on what is launched
        # Behind the compression: the next step's levels depend on what was reduced.
        *(("measure_norms",) if world > 1 and adapts(hardening.compression) else ()),
        *(("agree_alarms",) if world > 1 and guards.in_graph else ()),  # behind all checks
        *(("clip_norm",) if clipped else ()),  # on reduced gradients: all ranks have the same norm
        *(("overflow",) if scaled else ()),  # on what the optimizer will see
        *(("schedule",) if planned else ()),  # last: it moves what is there, and adds nothing
    )
    return ",".join(lines)


_SYNCHRONISE = (
    "participation",  # looks at what each gradient depends on, so before buckets mix gradients
    "running_stats",  # its broadcast is small: in front of all payloads
    "bucketing",  # before whatever puts gradients on a wire
)  # and behind them what reduces gradients: it fixes where collectives start and end


def _check_contracts(passes: Sequence[Pass]) -> None:
    provided: set[str] = set()
    for position, current in enumerate(passes):
        missing = current.requires - provided
        if missing:
            raise ValueError(
                f"option 'passes': {current.name!r} requires {', '.join(sorted(missing))}, which no earlier "
                "pass provides"
            )
        clash = next((p.name for p in passes if p.name in current.conflicts), None)
        if clash is not None:
            raise ValueError(f"option 'passes': {current.name!r} and {clash!r} exclude each other")
        if current.name in {p.name for p in passes[:position]}:
            raise ValueError(f"option 'passes': {current.name!r} stands twice")
        if position and STAGES.index(current.stage) < STAGES.index(passes[position - 1].stage):
            raise ValueError(
                f"option 'passes': {current.name!r} works on the {current.stage} graph and can't follow "
                f"{passes[position - 1].name!r}, which works on the {passes[position - 1].stage} graph"
            )
        behind = [p.name for p in passes[:position] if p.stage == current.stage and not p.local]
        if current.local and behind and current.stage == "backward":
            raise ValueError(
                f"option 'passes': {current.name!r} runs in local backwards too and can't follow "
                f"{behind[-1]!r}, which does not"
            )
        provided |= current.provides
