"""The entry point: a Dynamo graph in, a compiled callable out. Knows no pass by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxpasses import marking, pipeline
from fxpasses.config import Hardening
from fxpasses.distributed.group import refuse_wrapper, resolve
from fxpasses.dynamo import (
    describe_inputs,
    forget_none,
    gradients_held,
    gradients_set,
    mark_precision,
    own_settings,
    refuse_unsupported,
    user_errors_visible,
)
from fxpasses.faults.spec import UPDATE, parse_faults
from fxpasses.forward_state import add_states, states_of
from fxpasses.guards.option import RECOMPUTE, parse_guards
from fxpasses.owners import watch_optimizers
from fxpasses.unit import Unit

own_settings()
watch_optimizers()


def hardened(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Backend `"hardened"` of torch.compile: passes over the ATen graph, then Inductor.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs, fake.
        options: see `fxpasses.Hardening`.
        mode: a mode of Inductor, such as `"max-autotune"`.

    Raises:
        ValueError: for a wrong option, before anything is compiled.
    """
    import torch._inductor

    from fxpasses import inductor

    with user_errors_visible():
        gm, inputs, unit = make_unit(gm, example_inputs, options, inductor.decompositions())
    patches = torch._inductor.list_mode_options(mode) if mode else {}
    return inductor.compile_unit(gm, inputs, unit, patches)


def hardened_aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Backend `"hardened_aot_eager"`: the same passes, run by eager kernels. For debugging and tests."""
    from fxpasses import eager

    with user_errors_visible():
        gm, inputs, unit = make_unit(gm, example_inputs, options, {})
    return eager.compile_unit(gm, inputs, unit)


def make_unit(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    decompositions: dict[Any, Callable[..., Any]],
) -> tuple[fx.GraphModule, list[Any], Unit]:
    """A Dynamo graph with what its unit needs to find in it, its example inputs, and the unit. Called while
    Dynamo compiles.

    Args:
        decompositions: what the graphs will have been traced with.
    """
    hardening = Hardening.from_options(options)
    refuse_wrapper()
    group = resolve(hardening.process_group)
    refuse_unsupported(gm, example_inputs)
    passes = pipeline.build(hardening, group.name, group.size, group.rank)
    mark_precision(gm)
    scope, roles = describe_inputs(gm, example_inputs)
    sets_gradients: list[str] = []
    forget_none()
    strikes_updates = any(f.phase == UPDATE for f in parse_faults(hardening.faults))
    is_changed = group.size > 1 or passes.stage("backward") or strikes_updates
    if is_changed and marking.calls_backward(gm):
        sets_gradients = gradients_set(scope)
        gm = marking.mark(gm, roles, gradients_held(gm))
    is_whole_step = marking.is_marked(gm)
    if is_whole_step and parse_guards(hardening.guards).on == RECOMPUTE:
        raise ValueError(
            "option 'guards': on='recompute' runs a forward or a backward again, and the compiled "
            "function holds both; use 'skip' or 'raise'"
        )
    states = () if is_whole_step else states_of(passes.stage("joint"), example_inputs)
    unit = Unit(
        hardening,
        group,
        passes,
        scope,
        roles,
        decompositions,
        is_whole_step,
        sets_gradients,
        states,
    )
    gm, inputs = add_states(gm, example_inputs, states)
    return gm, inputs, unit
