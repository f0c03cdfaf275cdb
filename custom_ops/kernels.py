"""Which implementation of an operator runs: the one place that decides it, at each call, by the device of its
tensors and `FXPASSES_KERNELS`.

    FXPASSES_KERNELS   on the CPU                on a GPU (sm_80 or newer)
    not set            C++                       Triton if it is installed, else CUDA C++, else plain PyTorch
    triton             Triton's interpreter      Triton
    cuda               error                     CUDA C++
    reference          plain PyTorch             plain PyTorch

An implementation is a package with a module for each family of operators, and a function for each operator:
`custom_ops.cpp.quantise.quantise` and `custom_ops.triton.quantise.quantise` take the same arguments and return
the same bits. The operators themselves are registered once, for all devices; what they check is checked for all
implementations.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

CHOICE = "FXPASSES_KERNELS"
CHOICES = ("triton", "cuda", "reference")
DEVICES = ("cpu", "cuda")  # that the operators are registered for
OLDEST = (8, 0)  # compute capability


def operator(name: str) -> Callable[[Callable[..., Any]], torch.library.CustomOpDef]:
    """Decorator that registers a pure operator, for all devices.

    Inductor records none in a CUDA graph: when a kind of bucket is first met, tables are copied to the GPU, to
    stay there, kernels compiled and configurations tried.
    """
    return torch.library.custom_op(
        f"fxpasses::{name}",
        mutates_args=(),
        device_types=DEVICES,
        tags=(torch.Tag.cudagraph_unsafe,),
    )


def call(operator: str, like: torch.Tensor, *args: Any) -> Any:
    """Run an operator, `family.function`, by the implementation for the device of `like`.

    Raises:
        ValueError, RuntimeError: as `implementation` does.
    """
    name = implementation(like.device)
    family, function = operator.split(".")
    module = importlib.import_module(f"custom_ops.{name}.{family}")
    with _on(like.device, name):
        return getattr(module, function)(*map(_at_a_word, args))


def implementation(device: torch.device) -> str:
    """`cpp`, `triton`, `cuda` or `reference`: what runs for tensors of a device.

    Raises:
        ValueError: for an unknown value of FXPASSES_KERNELS.
        RuntimeError: when what it names can't run there.
    """
    chosen = choice()
    if chosen == "reference":
        return chosen
    if device.type == "cpu":
        return _on_cpu(chosen)
    _check_gpu(device)
    if chosen == "triton" and not has_triton():
        raise RuntimeError(f"{CHOICE}=triton: triton can't be imported; install it, or choose cuda")
    return chosen or _default_on_gpu()


def choice() -> str | None:
    """The value of FXPASSES_KERNELS; None if it isn't set.

    Raises:
        ValueError: for an unknown one.
    """
    chosen = os.environ.get(CHOICE)
    if chosen is not None and chosen not in CHOICES:
        raise ValueError(f"{CHOICE}={chosen!r}: expected one of {', '.join(CHOICES)}, or not set")
    return chosen


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def described(device: torch.device) -> str:
    """What runs for tensors of a device, for a reader; in a word or as the error that a call would raise."""
    try:
        return implementation(device)
    except (ValueError, RuntimeError) as error:
        return f"none: {error}"


def _at_a_word(arg: Any) -> Any:
    """A payload that does not begin at a multiple of 8 bytes as a copy that does: kernels read such words."""
    if not isinstance(arg, torch.Tensor) or arg.is_floating_point() or arg.data_ptr() % 8 == 0:
        return arg
    return arg.clone()


def _on_cpu(chosen: str | None) -> str:
    if chosen is None:
        return "cpp"
    if chosen == "triton" and not has_triton():
        raise RuntimeError(f"{CHOICE}=triton: triton can't be imported; install it")
    if chosen == "triton" and interpreted():
        return chosen
    instead = "TRITON_INTERPRET=1 runs them slowly, " if chosen == "triton" else ""
    raise RuntimeError(
        f"{CHOICE}={chosen}: these kernels need a GPU, and the tensors are on the CPU; {instead}"
        f"{CHOICE}=reference runs plain PyTorch, without {CHOICE} C++ runs"
    )


def _check_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise RuntimeError(
            f"no kernels for tensors on {device}: they exist for the CPU and for CUDA; {CHOICE}=reference runs "
            "plain PyTorch"
        )
    if torch.version.hip is not None:
        raise RuntimeError(f"no kernels for ROCm; {CHOICE}=reference runs plain PyTorch")
    if not torch.cuda.is_available():
        raise RuntimeError(f"no GPU was found for tensors on {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} is sm_{capability[0]}{capability[1]}: the kernels need "
            f"sm_80 or newer; {CHOICE}=reference runs plain PyTorch"
        )


@functools.cache
def _default_on_gpu() -> str:
    if has_triton():
        return "triton"
    from custom_ops.cuda import nvrtc

    if nvrtc.is_found():
        return "cuda"
    warnings.warn(
        "fxpasses: neither triton nor NVRTC is installed, so its operators run in plain PyTorch, many times "
        f"slower; install triton, or set {CHOICE}=reference if that is what you want",
        stacklevel=2,
    )
    return "reference"


def _on(device: torch.device, name: str) -> contextlib.AbstractContextManager[Any]:
    """Where new tensors, and launches, belong."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return device if name == "reference" else torch.cuda.device(device)
