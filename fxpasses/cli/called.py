"""What an input calls: a function with its arguments, for commands that run it many times.

package.module:name, file.py:name   what it returned
program.pt2                         its module, with the inputs that it was exported with
train.py                            what it compiles with this backend, as it calls that first
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fxpasses.cli.errors import InputError, raised_in
from fxpasses.cli.inputs import Exported, Input, Program, Script

_BACKENDS = ("hardened", "hardened_aot_eager")


@dataclasses.dataclass(frozen=True)
class Called:
    """A function or module, its arguments, and the options of the backend that it asks for itself."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def called(found: Input) -> Called:
    """What an input calls. A script runs up to there.

    Raises:
        InputError: for an exported program without example inputs, or whose gradients are in it already; for a
            script that calls nothing that it compiles with this backend, or that trains on several ranks.
    """
    if isinstance(found, Program):
        return Called(found.function, found.args)
    return _exported(found) if isinstance(found, Exported) else _first_call(found)


def blamed(call: Called, name: str, error: Exception) -> InputError:
    """What a compiled call raised; where the call raises by itself, that: it names lines of the user's."""
    try:
        call.function(*call.args, **call.kwargs)
    except Exception as own:
        return raised_in(own, name)
    return raised_in(error, name)


def _exported(found: Exported) -> Called:
    from fxpasses.exported import output_kinds

    program = found.program
    if program.example_inputs is None:
        raise InputError(
            f"{found.name}: holds no example inputs; save it with those that it was exported with"
        )
    made = [kind for kind, _ in output_kinds(program) if kind.startswith("GRADIENT")]
    if made:
        raise InputError(
            f"{found.name}: its graph computes gradients itself ({made[0]}); export the forward alone"
        )
    args, kwargs = program.example_inputs
    return Called(program.module(), args, kwargs)


class _Stop(BaseException):
    """Leaves a script at a call. Not an `Exception`: scripts catch these.

    Attributes:
        main: the script's names, in which Dynamo looks up what the function uses.
    """

    def __init__(self, call: Called) -> None:
        super().__init__()
        self.call = call
        self.main: ModuleType = sys.modules["__main__"]


def _first_call(script: Script) -> Called:
    with _stopping_at_compiled():
        try:
            script.run()
        except _Stop as stop:
            sys.modules["__main__"] = stop.main
            sys.path.insert(0, str(script.path.resolve().parent))
            _refuse_ranks(script)
            return stop.call
    raise InputError(f"{script.name}: it calls nothing that it compiles with backend='hardened'")


def _refuse_ranks(script: Script) -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InputError(
            f"{script.name}: it trains on {dist.get_world_size()} ranks; faults are injected here on one: "
            "start it without torchrun"
        )


@contextmanager
def _stopping_at_compiled() -> Iterator[None]:
    """Let `torch.compile` with this backend return what stops at its first call."""
    import torch

    original: Any = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, *, backend: Any = "inductor", **settings: Any) -> Any:
        if backend not in _BACKENDS or settings.get("disable"):
            return original(model, backend=backend, **settings)
        if model is None:
            return functools.partial(compile, backend=backend, **settings)
        return _stopping(model, settings.get("options") or {})

    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = original


def _stopping(model: Any, options: Mapping[str, Any]) -> Any:
    from torch import nn

    class Stopping(nn.Module):
        """In place of a compiled module, whose attributes are those of the module."""

        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = model

        def __getattr__(self, name: str) -> Any:
            own = self.__dict__.get("_modules", {})
            return own[name] if name in own else getattr(own["_orig_mod"], name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise _Stop(Called(model, args, kwargs, options))

    if isinstance(model, nn.Module):
        return Stopping()

    @functools.wraps(model)
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Stop(Called(model, args, kwargs, options))

    return stop
