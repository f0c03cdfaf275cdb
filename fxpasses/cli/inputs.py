"""What a command works on, from the word on the command line.

package.module:name   a function that returns (module, args), or a class with `example_inputs`
file.py:name          the same, from a file
program.pt2           what torch.export.save wrote
train.py              a script, run as it is; a saved repro is one
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fxpasses.cli.errors import InputError, one_line, raised_in
from fxpasses.config import nearest

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclasses.dataclass(frozen=True)
class Program:
    """A module or function, and example inputs for it."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported program, and the file that it comes from."""

    name: str
    program: ExportedProgram


@dataclasses.dataclass(frozen=True)
class Script:
    """A script that calls torch.compile itself."""

    name: str
    path: Path

    def run(self, arguments: Sequence[str] = ()) -> None:
        """Run it as `python SCRIPT ARGUMENTS` would, in this process.

        Raises:
            InputError: for what it raises, and an exit status that is not 0.
        """
        import runpy

        argv, path = sys.argv, list(sys.path)
        sys.argv = [str(self.path), *arguments]
        sys.path.insert(0, str(self.path.resolve().parent))
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise InputError(f"{self.path}: the script ended with {end.code!r}") from end
        except Exception as error:
            inner = getattr(error, "inner_exception", None)  # what torch.compile wraps
            if isinstance(inner, BrokenPipeError):  # nobody reads what is printed of its graphs
                raise inner from error
            raise raised_in(error, self.name) from error
        finally:
            sys.argv, sys.path[:] = argv, path


Input = Program | Exported | Script


def resolve(word: str) -> Input:
    """What a word on the command line stands for.

    The current directory becomes importable.

    Raises:
        InputError: naming the file, module or name that is wrong, or the line of the user's that raises.
    """
    name, colon, attribute = word.rpartition(":")
    if colon and name:
        return _program(word, name, attribute)
    path = Path(word)
    if path.suffix not in (".pt2", ".py"):
        raise InputError(
            f"{word!r}: expected module:name, a .pt2 that torch.export.save wrote, or a .py script"
        )
    if not path.is_file():
        raise InputError(f"{word}: no such file")
    return Script(word, path) if path.suffix == ".py" else Exported(word, _load(path))


def _load(path: Path) -> ExportedProgram:
    import torch

    with _Reasons() as reasons:
        try:
            return torch.export.load(path)
        except Exception as error:  # whatever a reader meets in a file that it does not know
            reason = reasons.found or error
            raise InputError(
                f"{path}: torch {torch.__version__} can't load it as an exported program: {one_line(reason)}"
            ) from error


class _Reasons(logging.Filter):
    """Keeps what torch.export.load logs with its traceback, and only points to in what it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.found: BaseException | None = None
        self._logger = logging.getLogger("torch.export")

    def __enter__(self) -> _Reasons:
        self._logger.addFilter(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Hide the record if it is about an exception."""
        if record.exc_info and record.exc_info[1] is not None:
            self.found = self.found or record.exc_info[1]
        return not record.exc_info


def _program(word: str, name: str, attribute: str) -> Program:
    module = _imported(name)
    if not hasattr(module, attribute):
        raise InputError(
            f"{word}: {name} has no {attribute!r}{nearest(attribute, _makers(module))}"
        )
    maker = getattr(module, attribute)
    try:
        made = maker()
        if inspect.isclass(maker):
            return Program(word, made, _examples(word, made))
    except InputError:
        raise
    except Exception as error:
        raise raised_in(error, word) from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise InputError(f"{word}: returned {type(made).__name__}; expected (module, args)")
    return Program(word, made[0], _as_tuple(made[1]))


def _imported(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        raise InputError(f"{name}: no such file")
    try:
        return _from_file(Path(name)) if is_file else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"{name}: no module of this name, in the current directory or installed"
            ) from error
        raise raised_in(error, name) from error
    except Exception as error:
        raise raised_in(error, name) from error


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where classes made in it are looked up
    spec.loader.exec_module(module)
    return module


def _makers(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]


def _examples(word: str, made: Any) -> tuple[Any, ...]:
    if not hasattr(made, "example_inputs"):
        raise InputError(
            f"{word}: a class without example_inputs; add it, or name a function that returns (module, args)"
        )
    examples = made.example_inputs
    return _as_tuple(examples() if callable(examples) else examples)


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, tuple | list) else (args,)
