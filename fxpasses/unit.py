"""One compiled region: what the passes did to it, and what its backward needs when it runs.

partition   joint graph ─▶ joint passes ─▶ forward + backward ─▶ backward passes ─▶ lowered backward
forward     remembers the parameters of this call at the autograd node
backward    state in ─▶ compiled backward ─▶ gradients, None where no loss took part
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpasses import aot
from fxpasses.config import Hardening
from fxpasses.distributed.group import Group, is_initialized
from fxpasses.dynamo import user_errors_visible
from fxpasses.effects import is_launch
from fxpasses.graph import Role, StateSpec, TrainingGraph, tangents_reaching
from fxpasses.observers import CheckRules, Dump
from fxpasses.passes.participation import STATE_KIND as PARTICIPATION
from fxpasses.passes.participation import tangent_sets
from fxpasses.pipeline import Observer, Pipeline
from fxpasses.runtimes import PlannedCollective, owner_of
from fxpasses.schedule.order import Event, events_of
from fxpasses.state import STORE

_ids = itertools.count()
_active = threading.local()


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """What is fixed about a backward once its passes have run.

    Attributes:
        states: state inputs in the order in which they follow the graph's own inputs.
        collectives: what it issues, in order.
        events: its order of collectives and heavy operators.
        sets: the different sets of tangents that parameter gradients depend on.
        needs: for each output the set of tangents that it depends on; empty where it needs none.
    """

    states: tuple[StateSpec, ...]
    collectives: tuple[PlannedCollective, ...]
    events: tuple[Event, ...]
    sets: tuple[frozenset[int], ...]
    needs: tuple[frozenset[int], ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One backward about to run: the parameters of its forward, and which outputs got a gradient."""

    unit: Unit
    parameters: dict[str, torch.nn.Parameter]
    given: tuple[bool, ...]

    def given_tangents(self) -> frozenset[int]:
        positions = enumerate(self.unit.returned)
        return frozenset(j for j, at in positions if at is None or self.given[at])


class Unit:
    """A region that Dynamo handed to the backend."""

    def __init__(
        self,
        hardening: Hardening,
        group: Group,
        pipeline: Pipeline,
        input_roles: Sequence[Role],
        decompositions: dict[Any, Callable[..., Any]],
    ) -> None:
        self.id = next(_ids)
        self.hardening = hardening
        self.group = group
        self.pipeline = pipeline
        self.input_roles = tuple(input_roles)
        self.decompositions = decompositions
        self.plan = BackwardPlan((), (), (), (), ())
        # For each tangent its position among what the forward returned; None: always given.
        self.returned: tuple[int | None, ...] = ()
        self.forward_metadata: Any = None
        self._tangents: list[fx.Node] = []
        self._initialized = is_initialized()

    # Compile time

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
        """
        if not aot.is_whole_joint(joint):
            return split(joint, joint_inputs, **kwargs)
        with user_errors_visible():
            forward_outputs = kwargs["num_fwd_outputs"]
            aot.annotate_joint(joint, forward_outputs, self.input_roles)
            self._run("joint", joint)
            forward, backward = split(joint, joint_inputs, **kwargs)
            roles = joint.graph.output_node().meta["roles"][forward_outputs:]
            aot.annotate_backward(backward, roles)
            self._transform_backward(backward)
        return forward, backward

    def _run(self, stage: str, module: fx.GraphModule) -> TrainingGraph:
        graph = TrainingGraph(module, self.decompositions)
        if not self.pipeline.stage(stage) and self.hardening.dump is None:
            return graph
        observers: list[Observer] = [CheckRules()]
        if self.hardening.dump is not None:
            folder = Path(self.hardening.dump) / f"rank{self.group.rank}" / f"g{self.id}.{stage}"
            observers.append(Dump(folder))
        self.pipeline.run(stage, graph, observers)
        return graph

    def _transform_backward(self, module: fx.GraphModule) -> None:
        graph = TrainingGraph(module, self.decompositions)
        reach = tangents_reaching(graph)
        nothing: frozenset[int] = frozenset()
        needs = tuple(reach.get(node, nothing) for _, node, _ in graph.outputs())
        sets = tuple(tangent_sets(graph))
        self._tangents = [node for node, _ in graph.inputs("tangent")]
        self._run("backward", module)
        collectives, events = planned_collectives(graph), events_of(graph.graph)
        self.plan = BackwardPlan(_lower_state(graph), collectives, events, sets, needs)

    def note_forward(self) -> None:
        """Called while the forward is being compiled: only then does AOTAutograd tell of its outputs."""
        self.forward_metadata = aot.forward_metadata()
        self.returned = aot.returned_positions(self._tangents, self.forward_metadata)

    # Run time

    def forward(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what Dynamo will call."""
        places = [
            (position, role.name)
            for position, role in enumerate(self.input_roles)
            if role.kind == "parameter"
        ]

        @functools.wraps(compiled)
        def run(*args: Any) -> Any:
            outputs = compiled(*args)
            node = aot.autograd_node((*outputs, *args), self.forward_metadata)
            if node is not None:
                parameters = {name: args[position] for position, name in places}
                if parameters:
                    owner_of(parameters).record_plan(self.id, self.plan.collectives)
                node.register_prehook(functools.partial(self._before_backward, parameters))
            return outputs

        return run

    def _before_backward(
        self, parameters: dict[str, torch.nn.Parameter], grad_outputs: Sequence[Any]
    ) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the hardened backend does not support double backward (create_graph=True) through a "
                "compiled region; compute this gradient in eager mode"
            )
        if is_initialized() != self._initialized:
            raise RuntimeError(
                "torch.distributed was initialised or shut down after this model was compiled; initialise it "
                "before the first forward, or call torch._dynamo.reset()"
            )
        _active.call = Call(self, parameters, tuple(g is not None for g in grad_outputs))

    def backward(self, compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Wrap a compiled backward that takes its arguments as one list."""

        def run(args: list[Any]) -> Any:
            call: Call | None = getattr(_active, "call", None)
            _active.call = None
            assert call is not None and call.unit is self, (
                "a compiled backward ran outside its autograd node"
            )
            given = call.given_tangents()
            flags = torch.tensor([float(bool(s & given)) for s in self.plan.sets])
            states = [self._state(spec, call, flags) for spec in self.plan.states]
            args.extend(states)
            outputs = compiled(args)
            if call.parameters:
                owner_of(call.parameters).record_backward(self.plan.collectives)
            return self._drop_unused(outputs, given, states)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _state(self, spec: StateSpec, call: Call, flags: torch.Tensor) -> torch.Tensor:
        if spec.kind == PARTICIPATION:
            return flags.to(spec.device)
        return STORE.get(call.parameters[spec.parameter], spec)

    def _drop_unused(
        self, outputs: Sequence[Any], given: frozenset[int], states: list[torch.Tensor]
    ) -> Sequence[Any]:
        """None in place of a gradient whose tangents were given on no rank."""
        plan = self.plan
        if len(given) == len(self.returned):
            return outputs
        unused = {s for s in plan.needs if s and not s & given}
        for spec, total in zip(plan.states, states, strict=True):
            if spec.kind == PARTICIPATION and unused:
                elsewhere = [s for s, t in zip(plan.sets, total.tolist(), strict=True) if t]
                unused -= set(elsewhere)
        return [None if need in unused else x for x, need in zip(outputs, plan.needs, strict=True)]


def planned_collectives(graph: TrainingGraph) -> tuple[PlannedCollective, ...]:
    """The launches of a graph, in order."""
    return tuple(_planned(node) for node in graph.walk() if is_launch(node))


def _planned(node: fx.Node) -> PlannedCollective:
    payload = node.args[0]
    assert isinstance(payload, fx.Node)
    value = payload.meta["val"]
    provenance = node.meta["provenance"]
    return PlannedCollective(
        operator=node.target._opname,  # type: ignore[union-attr]
        group=str(node.args[-1]),
        dtype=str(value.dtype).removeprefix("torch."),
        numel=int(value.numel()),
        bytes=int(value.numel()) * value.element_size(),
        parameters=provenance.parameters,
        model_line=provenance.model_line,
    )


def _lower_state(graph: TrainingGraph) -> tuple[StateSpec, ...]:
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
        aot.rename_state_input(node)
    if specs:
        kept = [(n, r) for _, n, r in graph.outputs() if r.kind != "state"]
        graph.output_node.args = (tuple(n for n, _ in kept),)
        graph.output_node.meta["roles"] = tuple(r for _, r in kept)
        graph.recompile()
    return tuple(specs)
