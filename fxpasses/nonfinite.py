"""`explain_nonfinite`: where in a step the first NaN or infinity comes from.

The step's graphs are made as the backend makes them, casts and loss scale included, and run node by node. What
reduces gradients over ranks is left out: each rank explains its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxpasses import pipeline
from fxpasses.config import Hardening, LossScale
from fxpasses.distributed.group import Group
from fxpasses.dynamo import describe_inputs, mark_precision, user_errors_visible
from fxpasses.owners import runtime
from fxpasses.probe import Nonfinite, Probe, kind_of
from fxpasses.unit import Unit

_count = itertools.count()
_ELSEWHERE = "code that is not compiled"


@dataclasses.dataclass
class _Search:
    """A step under way: the loss scale that it has, and what was found first."""

    scale: float
    found: Nonfinite | None = None

    def run(self, module: fx.GraphModule, phase: str, *args: Any) -> Any:
        probe = Probe(module, phase)
        results = probe.run(*args)
        self.found = self.found or probe.found
        return results


# The one under way: compiled graphs outlive it, and autograd may run them in threads of its own.
_search = _Search(1.0)


def explain_nonfinite(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Nonfinite | None:
    """Run forward and backward once more, and name the first node that made a value that is not finite.

    Nothing is communicated; parameters, buffers, `.grad` and the state of torch's random number generators are
    what they were afterwards. Nodes run one by one in the dtypes of the graph. Compiled code may keep what lies
    between two of them in fp32, and overflow a bit later than this does.

    Args:
        model: a module, compiled or not.
        batch: its input; a tuple or list are its positional arguments, a mapping its keyword arguments.
        loss_fn: makes the loss of what the model returns. It runs as written, in no other precision. None: the
            sum of all that it returns.
        options: as for `torch.compile`; by default those that the model was compiled with, once it has run.

    Returns:
        None if loss and gradients are finite. What code makes that Dynamo runs eagerly is noticed, not located.

    Raises:
        ValueError: for something else than a module; for a model that communicates by itself.
    """
    module = getattr(model, "_orig_mod", model)
    if not isinstance(module, nn.Module):
        raise ValueError(f"explain_nonfinite: got {model!r}; expected a module, compiled or not")
    hardening, scale = _settings(module, options)
    args, kwargs = _arguments(batch)
    global _search
    _search = search = _Search(scale)
    with _left_alone(module), torch.enable_grad():
        outputs = _probed(module, hardening)(*args, **kwargs)
        loss = _total(outputs) if loss_fn is None else _probed(loss_fn, Hardening())(outputs)
        trained = [p for p in module.parameters() if p.requires_grad]
        gradients: Sequence[Any] = ()
        if trained and loss.requires_grad:
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    kind = kind_of((loss, gradients))
    if not kind:
        return None
    found = search.found or Nonfinite(kind, _ELSEWHERE, "", "forward", "", "", "", ())
    own_line = found.model_line.startswith(__file__)  # of a module of torch, called from here
    return dataclasses.replace(found, model_line="") if own_line else found


def _settings(module: nn.Module, options: Mapping[str, Any] | None) -> tuple[Hardening, float]:
    """The options that count here, and the loss scale."""
    owner = runtime(module) if any(True for _ in module.parameters()) else None
    hardening = owner.hardening if options is None and owner is not None else None
    hardening = hardening or Hardening.from_options(options)
    if owner is not None and owner.scaler is not None and options is None:
        return hardening, owner.scaler.scale
    scale = LossScale.parse(hardening.loss_scale)
    return hardening, scale.init if isinstance(scale, LossScale) else scale or 1.0


def _arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _total(outputs: Any) -> torch.Tensor:
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    return torch.stack([x.float().sum() for x in tensors if x.is_floating_point()]).sum()


@contextlib.contextmanager
def _left_alone(module: nn.Module) -> Iterator[None]:
    """Put buffers and random numbers back afterwards."""
    owners = [(m, name, b) for m in module.modules() for name, b in m._buffers.items()]
    kept = [(m, name, b, None if b is None else b.clone()) for m, name, b in owners]
    devices = {
        p.device for p in (*module.parameters(), *module.buffers()) if p.device.type != "cpu"
    }
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        stack.enter_context(torch.random.fork_rng([]))
        try:
            yield
        finally:
            with torch.no_grad():
                for owner, name, buffer, value in kept:
                    owner._buffers[name] = buffer
                    if buffer is not None and value is not None:
                        buffer.copy_(value)


def _probed(function: Callable[..., Any], hardening: Hardening) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # A code of its own: what Dynamo remembers, it remembers by the code.
    code = call.__code__.replace(co_name=f"explain_{next(_count)}")
    fresh = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    key = dataclasses.replace(
        Hardening(),
        precision=hardening.precision,
        precision_rules=hardening.precision_rules,
        loss_scale=hardening.loss_scale_in_graph or "none",
        passes=hardening.passes,
    )
    return torch.compile(fresh, backend=_backend(key))


@functools.cache
def _backend(hardening: Hardening) -> Callable[..., Any]:
    """One for the same options: what Dynamo keeps of code behind graph breaks is then kept once."""

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with user_errors_visible():
            mark_precision(gm)
            scope, roles = describe_inputs(gm, example_inputs)
            unit = Unit(
                hardening, Group(None, 1, 0), pipeline.on_one_rank(hardening), scope, roles, {}
            )

        def forward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return make_boxed_func(lambda *args: _search.run(module, "forward", *args))

        def backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            states = unit.backward(unit.primary).states

            def run(*args: Any) -> Any:
                scales = [torch.full((), _search.scale, device=s.device) for s in states]
                return _search.run(module, "backward", *args, *scales)

            return make_boxed_func(run)

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            unit.inference(module)
            return forward(module, inputs)

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return unit.partition(
                joint, joint_inputs, min_cut_rematerialization_partition, **kwargs
            )

        compile_joint = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
        )
        with functorch_config.patch(backward_pass_autocast="off"):
            return compile_joint(gm, example_inputs)

    return compile_graph
