"""What we need of `torch._inductor` internals. Checked on torch 2.11, 2.13 and 2.14.

Sources: `torch/_inductor/compile_fx.py` (the way in), `torch/_inductor/fx_passes/control_dependencies.py`
(an operator that carries extra dependencies through lowering, scheduling and code generation).
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from functorch.compile import make_boxed_func
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from fxpasses.calls import Calls
from fxpasses.graph import copied
from fxpasses.guards.option import parse_guards
from fxpasses.memory import shares_memory
from fxpasses.schedule import order
from fxpasses.schedule.order import Event, OrderError
from fxpasses.step_calls import StepCalls
from fxpasses.unit import Backward, Unit

C10D = torch.ops._c10d_functional


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor expects to have been decomposed when a graph reaches it."""
    return select_decomp_table()


def compile_unit(
    gm: fx.GraphModule, example_inputs: Sequence[Any], unit: Unit, patches: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a Dynamo graph through Inductor, with the unit's passes around the partitioner.

    AOTAutograd's own cache is passed by, since a hit would skip the passes, and with them plan, dump and
    state. Inductor's cache, keyed by the graph that the passes made, still spares the compilation.
    """
    calls = StepCalls(unit) if unit.is_whole_step else Calls(unit)
    patches = {**patches, "custom_partitioner_fn": _Partitioner(unit)}
    schedule_check = unit.hardening.schedule_check
    recomputes = parse_guards(unit.hardening.guards).repeats_calls
    if recomputes:
        # The cache does not tell code that overwrites saved values from code that does not.
        patches["fx_graph_cache"] = False

    def inner_compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if kwargs.get("is_inference"):
            if isinstance(calls, StepCalls):
                step = unit.take_whole_step(module)
                compile_variant = _VariantCompiler(
                    step.module, inputs, kwargs, patches, schedule_check
                )
                return calls.step(compile_variant.compile(step), compile_variant)
            unit.inference(module)
            return compile_fx_inner(module, inputs, **kwargs)
        if not kwargs.get("is_backward"):
            unit.note_forward()
            return compile_fx_inner(module, inputs, **kwargs)
        primary = unit.backward(unit.primary)
        compiled = _compile_backward(module, inputs, primary.events, kwargs, schedule_check)
        own = inputs[: len(inputs) - len(primary.states)]
        variants = _VariantCompiler(module, own, kwargs, patches, schedule_check)
        return calls.backward(compiled, variants)

    with functorch_config.patch(
        enable_autograd_cache=False,
        backward_pass_autocast="off",
        # What a backward may run twice, it may not overwrite.
        donated_buffer=functorch_config.donated_buffer and not recomputes,
    ):
        compiled: Any = compile_fx(gm, list(example_inputs), inner_compile, config_patches=patches)
    return calls.forward(compiled)


def trace_unit(gm: fx.GraphModule, example_inputs: Sequence[Any], unit: Unit) -> Callable[..., Any]:
    """The same graphs, passes included, without generating code: the forward runs node by node, on one rank.

    What its backward is, passes have seen when this returns; if the program runs it, all gradients are None.
    """

    def inner_compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if kwargs.get("is_backward"):
            gradients = [None] * len(module.graph.output_node().args[0])  # type: ignore[arg-type]
            return make_boxed_func(lambda *args: list(gradients))
        if not kwargs.get("is_inference"):
            unit.note_forward()
        elif unit.is_whole_step:
            unit.take_whole_step(copied(module))
        else:
            unit.inference(module)
        return make_boxed_func(module.forward)

    patches = {"custom_partitioner_fn": _Partitioner(unit)}
    with functorch_config.patch(enable_autograd_cache=False, backward_pass_autocast="off"):
        traced: Any = compile_fx(gm, list(example_inputs), inner_compile, config_patches=patches)
    return traced


def _compile_backward(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    events: tuple[Event, ...],
    kwargs: dict[str, Any],
    schedule_check: str,
) -> Callable[[list[Any]], Any]:
    if not events:
        return compile_fx_inner(module, inputs, **kwargs)
    if inductor_config.cpp_wrapper:
        raise RuntimeError(
            "the hardened backend checks the order of collectives in Inductor's Python wrapper; "
            "torch._inductor.config.cpp_wrapper must be off"
        )
    theirs = inductor_config.post_grad_custom_post_pass
    ours: Any = _KeepOrder(events) if theirs is None else _Both(theirs, _KeepOrder(events))
    with inductor_config.patch(post_grad_custom_post_pass=ours):
        compiled = compile_fx_inner(module, inputs, **kwargs)
    code = getattr(compiled, "source_code", None)
    if not code:
        raise OrderError(
            "Inductor gave no source code, so the order of collectives can't be checked"
        )
    try:
        order.check_emitted(events, code)
    except OrderError as error:
        if schedule_check == "error":
            error.add_note("schedule_check='warn' runs it nevertheless")
            raise
        warnings.warn(str(error), stacklevel=2)
    return compiled


class _VariantCompiler:
    """Compiles other variants of a backward, later, as AOTAutograd would have compiled them then.

    Args:
        module: the variant that has been compiled.
        inputs: fake inputs that all variants share.
        schedule_check: as the option of this name.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        kwargs: dict[str, Any],
        patches: dict[str, Any],
        schedule_check: str,
    ) -> None:
        self._like, self._inputs = module.graph.output_node().meta, list(inputs)
        self._kwargs, self._patches, self._check = kwargs, patches, schedule_check
        self._tracing = torch._guards.TracingContext.try_get()
        self._compiling = torch._guards.CompileContext.try_get()

    def __call__(self, backward: Backward) -> Callable[[list[Any]], Any]:
        with (
            torch._guards.tracing(self._tracing),
            torch._guards.compile_context(self._compiling),
            inductor_config.patch(self._patches),
        ):
            return self.compile(backward)

    def compile(self, backward: Backward) -> Callable[[list[Any]], Any]:
        """Compile one, while AOTAutograd compiles."""
        module = backward.module
        meta = module.graph.output_node().meta
        meta.update({k: v for k, v in self._like.items() if k not in meta})
        placeholders = module.graph.find_nodes(op="placeholder")
        states = [node.meta["val"] for node in placeholders[len(self._inputs) :]]
        inputs = [*self._inputs, *states]
        return _compile_backward(module, inputs, backward.events, self._kwargs, self._check)


class _Partitioner(CustomPartitionerFn):
    """Runs the passes, then the partitioner that would have run."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._theirs = inductor_config.custom_partitioner_fn

    def __deepcopy__(self, memo: Any) -> _Partitioner:
        return self  # Inductor copies its settings; the unit must stay the one that runs

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        split = self._theirs or min_cut_rematerialization_partition
        return self._unit.partition(gm, joint_inputs, split, **kwargs)

    def uuid(self) -> Any:
        # Constant: Inductor's cache keys on the graph that the passes made, so they need no part in it.
        return ("fxpasses", self._theirs.uuid() if self._theirs else None)

    def __reduce__(self) -> Any:
        # Inductor pickles its settings into the cache key; a unit in there would turn the cache off.
        return (str, (repr(self.uuid()),))


class _KeepOrder(CustomGraphPass):
    """Ties each collective to its neighbours in the planned order.

    Inductor may reorder for memory and fuse; an explicit dependency is the one thing that it keeps. Both
    ends are tied: a wait behind the computation that hides it, and that computation behind the launch.
    """

    def __init__(self, events: tuple[Event, ...]) -> None:
        self._events = events

    def __call__(self, graph: fx.Graph) -> None:
        nodes = {node.name: node for node in graph.nodes}
        present = [e for e in self._events if e.name in nodes]
        lost = [e for e in self._events if e.kind != "compute" and e.name not in nodes]
        if lost:
            raise OrderError(f"Inductor removed the {lost[0].kind} {lost[0].name!r}")
        earlier: dict[fx.Node, OrderedSet[fx.Node]] = {}
        for first, second in order.links(present):
            earlier.setdefault(nodes[second], OrderedSet()).add(nodes[first])
        for node in earlier:
            _reduce_in_place(node)
        preserve_node_ordering(graph, earlier)

    def uuid(self) -> str:
        code = (inspect.getsource(_KeepOrder), inspect.getsource(order))
        return _digest(*code, repr([dataclasses.astuple(e) for e in self._events]))


class _Both(CustomGraphPass):
    """A pass that the user installed, then ours."""

    def __init__(self, theirs: Any, ours: CustomGraphPass) -> None:
        self._theirs = theirs if isinstance(theirs, list | tuple) else [theirs]
        self._ours = ours

    def __call__(self, graph: fx.Graph) -> None:
        for theirs in self._theirs:
            theirs(graph)
        self._ours(graph)

    def uuid(self) -> Any:
        # None (do not cache) as soon as one of theirs has no identity of its own.
        keys = [getattr(theirs, "uuid", lambda: None)() for theirs in self._theirs]
        return None if None in keys else _digest(repr(keys), str(self._ours.uuid()))


def _reduce_in_place(node: fx.Node) -> None:
    """Let an all-reduce write over a payload that nothing else reads: Inductor's own rewrite to the same
    end does not look inside a node that carries dependencies.
    """
    if node.target is not C10D.all_reduce.default:
        return
    payload = node.args[0]
    assert isinstance(payload, fx.Node)
    is_computed = isinstance(payload.target, torch._ops.OpOverload)
    if is_computed and not shares_memory(payload) and len(payload.users) == 1:
        node.target = C10D.all_reduce_.default


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
