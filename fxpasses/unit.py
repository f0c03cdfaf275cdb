"""One compiled region at compile time: its passes, and what they make of its backward.

joint graph ─▶ joint passes ─▶ partition ─▶ variant ─▶ backward passes ─▶ state lowered to writes ─▶ compiler

A whole step (`whole_step.py`) is not partitioned: its head goes the same way, then its tail joins it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpasses import aot, forward_state, tail
from fxpasses.compression import parse_rules
from fxpasses.config import Hardening
from fxpasses.distributed.group import Group, global_rank
from fxpasses.distributed.plans import Plan, PlannedCollective
from fxpasses.dump.folder import Dump
from fxpasses.dump.repro import Repro
from fxpasses.dump.torch_trace import TorchTrace, is_traced
from fxpasses.dynamo import region_being_compiled, user_errors_visible
from fxpasses.facts import Facts, facts_of, planned_collectives
from fxpasses.faults.sites import Places, places_of, written_parameters
from fxpasses.graph import (
    Role,
    StateSpec,
    TrainingGraph,
    copied,
    empty_like,
)
from fxpasses.guards.alarms import places_of_alarms
from fxpasses.guards.regions import checked_modules
from fxpasses.levels import LevelChoice
from fxpasses.observers import CheckRules, GraphName, watchers_of
from fxpasses.passes.clip_norm import ClipNorm
from fxpasses.passes.inject_update import InjectUpdate
from fxpasses.pipeline import Observer, Pipeline
from fxpasses.schedule.choose import choose
from fxpasses.schedule.order import Event, events_of
from fxpasses.scope import Scope
from fxpasses.variants import (
    LEFT,
    LOCAL,
    SYNCHRONISE,
    TOTAL,
    Variant,
    prepare,
)
from fxpasses.whole_step import WholeStep, split

_ids = itertools.count()


@dataclasses.dataclass(frozen=True)
class Backward:
    """One variant of a backward, once its passes have run.

    Attributes:
        module: the graph, state lowered to writes.
        states: state inputs in the order in which they follow the graph's own inputs.
        collectives: what it issues, in order.
        events: its order of collectives and heavy operators.
        places: for faults.
        alarm_places: by number, what guards' alarms can be about.
        modules: of which something is checked, with option `guards` and its `region`.
    """

    module: fx.GraphModule
    states: tuple[StateSpec, ...]
    collectives: tuple[PlannedCollective, ...]
    events: tuple[Event, ...]
    places: Places
    alarm_places: dict[int, str]
    modules: frozenset[str]


class Unit:
    """A region that Dynamo handed to the backend."""

    def __init__(
        self,
        hardening: Hardening,
        group: Group,
        pipeline: Pipeline,
        scope: Scope,
        input_roles: Sequence[Role],
        decompositions: dict[Any, Callable[..., Any]],
        is_whole_step: bool = False,
        sets_gradients: Iterable[str] = (),
        forward_states: tuple[StateSpec, ...] = (),
    ) -> None:
        self.id = next(_ids)
        self.region = region_being_compiled()
        self.hardening = hardening
        self.group = group
        self.pipeline = pipeline
        self.scope = scope
        self.input_roles = (*input_roles, *(Role("state", s.name) for s in forward_states))
        self.forward_states = forward_states
        self.places = Places()  # for faults in the forward
        self.alarm_places: dict[int, str] = {}  # that guards of the forward can be about
        self.modules: frozenset[str] = frozenset()  # of which the forward checks something
        self.decompositions = decompositions
        self.is_whole_step = is_whole_step
        self.whole_step: WholeStep | None = None  # once it has been traced
        self.updates_parameters = False  # whether the whole step writes some
        self._sets_gradients = tuple(sorted(sets_gradients))
        self.levels = LevelChoice(parse_rules(hardening.compression), scope.layers)
        self.primary = Variant(LOCAL) if self._accumulates else self.starting(SYNCHRONISE)
        self.facts = Facts()
        # For each tangent its position among what the forward returned; None: always given.
        self.returned: tuple[int | None, ...] = ()
        self.forward_metadata: Any = None
        self._tangents: list[fx.Node] = []
        self._base: fx.GraphModule | None = None  # the backward, untouched by passes
        self._backwards: dict[Variant, Backward] = {}

    def plan(self, instance: tuple[int, ...]) -> Plan:
        """What a synchronising backward sends.

        Args:
            instance: which of the modules that share this unit.
        """
        if self._base is None:
            collectives: tuple[PlannedCollective, ...] = ()
        else:
            mode = TOTAL if self._accumulates else SYNCHRONISE
            collectives = self.backward(self.starting(mode)).collectives
        passes, facts = self.pipeline.spec, self.facts
        works_on_gradients = self.whole_step.works_on_gradients if self.whole_step else ""
        return Plan(
            code=self.scope.code,
            instance=instance,
            passes=passes,
            collectives=collectives,
            parameters=facts.parameters,
            buffers=facts.buffers,
            sets_gradients=self._sets_gradients,
            works_on_gradients=works_on_gradients,
        )

    def starting(self, mode: str, **fields: Any) -> Variant:
        """A variant that sends something, before compression that changes has anything to go by."""
        return Variant(mode, levels=self.levels.start if self.levels else None, **fields)

    @property
    def synchronises(self) -> bool:
        """Whether a backward that synchronises differs from one that does not."""
        return not all(p.local for p in self.pipeline.stage("backward"))

    @property
    def clip_norm(self) -> float | None:
        """Where the limit of the gradients' norm starts; None where they are not clipped."""
        found = (p for p in self.pipeline.passes if isinstance(p, ClipNorm))
        return next((p.max_norm for p in found), None)

    @property
    def _accumulates(self) -> bool:
        return self.hardening.accumulate > 1 and self.synchronises

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        split: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Run the passes around a partitioner.

        Args:
            split: the partitioner, called as AOTAutograd would call it.

        Returns:
            The forward, and the primary variant of the backward.
        """
        if not aot.is_whole_joint(joint):
            return split(joint, joint_inputs, **kwargs)
        with user_errors_visible():
            if self.is_whole_step:
                raise ValueError(
                    "the compiled function calls backward() and returns a tensor that requires grad; over "
                    "several ranks return tensor.detach(), or compile the two as functions of their own"
                )
            forward_outputs = kwargs["num_fwd_outputs"]
            aot.annotate_joint(joint, forward_outputs, self.input_roles)
            forward_state.annotate(joint, self.forward_states)
            whole = TrainingGraph(joint, self.decompositions)
            self._run(self.pipeline, "joint", whole, self._onlookers("joint"))
            self._note_places(whole)
            forward, backward = split(joint, joint_inputs, **kwargs)
            aot.annotate_backward(backward, joint, forward_outputs)
            graph = TrainingGraph(backward)
            self._base, self.facts = backward, facts_of(graph)
            self._tangents = [node for node, _ in graph.inputs("tangent")]
            return forward, self.backward(self.primary).module

    def inference(self, module: fx.GraphModule) -> None:
        """Run the joint passes over a graph that records no backward, in place."""
        if not aot.is_whole_joint(module):
            return
        with user_errors_visible():
            outputs = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
            aot.annotate_joint(module, outputs, self.input_roles)
            forward_state.annotate(module, self.forward_states)
            self._warn_of_statistics(aot.written_buffers(module))
            graph = TrainingGraph(module, self.decompositions)
            self._run(self.pipeline, "joint", graph, self._onlookers("inference"))
            self._note_places(graph)

    def _note_places(self, joint: TrainingGraph) -> None:
        self.places, self.alarm_places = places_of(joint), places_of_alarms(joint)
        self.modules = checked_modules(joint)

    def _warn_of_statistics(self, written: Iterable[StateSpec]) -> None:
        """Running statistics travel with a backward; without one each rank keeps its own."""
        names = [spec.parameter for spec in written if spec.dtype.is_floating_point]
        if names and self.synchronises and self.group.size > 1:
            warnings.warn(
                f"{self.scope.code} updates {', '.join(names)} and has no backward: each rank keeps its own "
                "values. Call eval() on norms that are frozen, or compile them together with what trains",
                stacklevel=2,
            )

    def take_whole_step(self, module: fx.GraphModule) -> Backward:
        """Run the passes on a whole step, as AOTAutograd traced it; returns the primary variant."""
        with user_errors_visible():
            aot.annotate_whole_step(module, self.input_roles)
            step = split(module, self.decompositions)
            head = TrainingGraph(step.head, self.decompositions)
            self._run(self.pipeline, "joint", head, self._onlookers("joint"))
            self._base, self.facts, self.whole_step = step.head, facts_of(head), step
            return self.backward(self.primary)

    def backward(self, variant: Variant) -> Backward:
        """A variant of the backward, made when it is first asked for."""
        if variant not in self._backwards:
            self._backwards[variant] = self._make(variant)
        return self._backwards[variant]

    def _make(self, variant: Variant) -> Backward:
        assert self._base is not None, "no backward was recorded"
        module = empty_like(self._base) if variant.mode == LEFT else copied(self._base)
        graph = TrainingGraph(module, self.decompositions)
        name = "backward" if variant == self.primary else f"backward-{variant.mode}"
        if variant.union is not None:
            name += f"-union{sum(v.union is not None for v in self._backwards)}"
        if self.levels and variant.levels not in (None, self.levels.start):
            others = {v.levels for v in self._backwards} - {None, self.levels.start, variant.levels}
            name += f"-levels{len(others) + 1}"
        pipeline = self.pipeline.bind(layout=variant.layout, levels=variant.levels)
        onlookers = self._onlookers(name)
        has_local = any(p.local for p in pipeline.stage("backward"))
        if variant.mode == LOCAL or (has_local and variant.mode != LEFT):
            self._run(pipeline, "backward", graph, onlookers, local=True)
        # What is pending was made by local backwards, their passes included.
        self._prepare(graph, variant)
        if variant.mode != LOCAL:
            if variant.layout is None:
                pipeline = choose(pipeline, graph, self.hardening, self.group.size)
            self._run(pipeline, "backward", graph, onlookers, local=False)
        step = None if variant.mode == LEFT else self.whole_step
        if step is not None:
            tail.join(step, graph)
            InjectUpdate(self.hardening.faults).run(graph)
            self.updates_parameters = bool(written_parameters(graph))
        collectives, events = planned_collectives(graph), events_of(graph.graph)
        places, alarm_places = places_of(graph), places_of_alarms(graph)
        modules = checked_modules(graph)
        states = _lower_state(graph, step is None)
        return Backward(module, states, collectives, events, places, alarm_places, modules)

    def _prepare(self, graph: TrainingGraph, variant: Variant) -> None:
        if self.whole_step is None:
            prepare(graph, variant)
        else:
            tail.prepare(self.whole_step, graph, variant)

    def _run(
        self,
        pipeline: Pipeline,
        stage: str,
        graph: TrainingGraph,
        onlookers: Sequence[Observer],
        local: bool | None = None,
    ) -> None:
        if pipeline.stage(stage) or onlookers:
            pipeline.run(stage, graph, [CheckRules(), *onlookers], local)

    def _onlookers(self, name: str) -> list[Observer]:
        """What looks on while passes run over a graph: dump and torch's trace, if asked for, and watchers."""
        full = GraphName(global_rank(), self.id, name)
        folder = self.hardening.dump or os.environ.get("FXPASSES_DUMP")
        found: list[Observer] = []
        if folder:
            own = Path(folder) / str(full)
            found += [Dump(own), Repro(own / "repro.py", str(full))]
        if is_traced():
            found.append(TorchTrace(str(full)))
        return [*found, *watchers_of(full)]

    @property
    def trains(self) -> bool:
        """Whether a backward was recorded."""
        return self.forward_metadata is not None

    def note_forward(self) -> None:
        """Called while the forward is being compiled: only then does AOTAutograd tell of its outputs."""
        self.forward_metadata = aot.forward_metadata()
        self.returned = aot.returned_positions(self._tangents, self.forward_metadata)


def _lower_state(graph: TrainingGraph, is_backward: bool) -> tuple[StateSpec, ...]:
    """Turn state outputs into writes of the state inputs: the caller's signature knows no such outputs."""
    written = {role.name: node for _, node, role in graph.outputs("state")}
    specs: list[StateSpec] = []
    for node, role in graph.inputs("state"):
        specs.append(node.meta["state"])
        if role.name in written:
            with graph.graph.inserting_before(graph.output_node):
                copy = graph.graph.call_function(
                    torch.ops.aten.copy_.default, (node, written[role.name])
                )
            copy.meta["val"] = node.meta["val"]
        if is_backward:
            aot.rename_state_input(node)
    if specs:
        kept = [(n, r) for _, n, r in graph.outputs() if r.kind != "state"]
        graph.output_node.args = (tuple(n for n, _ in kept),)
        graph.output_node.meta["roles"] = tuple(r for _, r in kept)
        graph.recompile()
    return tuple(specs)
