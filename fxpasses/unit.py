"""One compiled region at compile time: its passes, and the plan that they leave for its backward.

joint graph ─▶ joint passes ─▶ partition ─▶ backward passes ─▶ state lowered to writes ─▶ compiler
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpasses import aot
from fxpasses.config import Hardening
from fxpasses.distributed.group import Group, global_rank
from fxpasses.dynamo import region_being_compiled, user_errors_visible
from fxpasses.effects import is_launch
from fxpasses.graph import Role, StateSpec, TrainingGraph, tangents_reaching
from fxpasses.observers import CheckRules, Dump
from fxpasses.passes.participation import tangent_sets
from fxpasses.pipeline import Observer, Pipeline
from fxpasses.rewrite import Provenance, model_line
from fxpasses.runtimes import PlannedCollective
from fxpasses.schedule.order import Event, events_of
from fxpasses.scope import Scope

_ids = itertools.count()


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """What is fixed about a backward once its passes have run.

    Attributes:
        states: state inputs in the order in which they follow the graph's own inputs.
        collectives: what it issues, in order.
        events: its order of collectives and heavy operators.
        sets: the different sets of tangents that gradients depend on.
        needs: for each output the set of tangents that it depends on; empty where it needs none.
    """

    states: tuple[StateSpec, ...]
    collectives: tuple[PlannedCollective, ...]
    events: tuple[Event, ...]
    sets: tuple[frozenset[int], ...]
    needs: tuple[frozenset[int], ...]


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
    ) -> None:
        self.id = next(_ids)
        self.region = region_being_compiled()
        self.hardening = hardening
        self.group = group
        self.pipeline = pipeline
        self.scope = scope
        self.input_roles = tuple(input_roles)
        self.decompositions = decompositions
        self.plan = BackwardPlan((), (), (), (), ())
        # For each tangent its position among what the forward returned; None: always given.
        self.returned: tuple[int | None, ...] = ()
        self.forward_metadata: Any = None
        self._tangents: list[fx.Node] = []

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
            aot.annotate_backward(backward, joint, forward_outputs)
            self._transform_backward(backward)
        return forward, backward

    def _run(self, stage: str, module: fx.GraphModule) -> TrainingGraph:
        graph = TrainingGraph(module, self.decompositions)
        if not self.pipeline.stage(stage) and self.hardening.dump is None:
            return graph
        observers: list[Observer] = [CheckRules()]
        if self.hardening.dump is not None:
            folder = Path(self.hardening.dump) / f"rank{global_rank()}" / f"g{self.id}.{stage}"
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

    @property
    def trains(self) -> bool:
        """Whether a backward was recorded."""
        return self.forward_metadata is not None

    def note_forward(self) -> None:
        """Called while the forward is being compiled: only then does AOTAutograd tell of its outputs."""
        self.forward_metadata = aot.forward_metadata()
        self.returned = aot.returned_positions(self._tangents, self.forward_metadata)


def planned_collectives(graph: TrainingGraph) -> tuple[PlannedCollective, ...]:
    """The launches of a graph, in order."""
    return tuple(_planned(node) for node in graph.walk() if is_launch(node))


def _planned(node: fx.Node) -> PlannedCollective:
    payload = node.args[0]
    assert isinstance(payload, fx.Node)
    value = payload.meta["val"]
    provenance = node.meta.get("provenance") or Provenance(
        "program", "", node.name, model_line(node)
    )
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
