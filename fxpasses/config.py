"""`Hardening`: what a user may ask of the backend.

One frozen dataclass is the schema of `torch.compile(options=...)`, the layout of a profile file and a
part of every cache key. A wrong key or value is a `ValueError` that names the option, what it got and
what would work, raised before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxpasses.patterns import quoted

REDUCTIONS = ("mean", "sum")
ANY, FIXED = ORDERS = ("any", "fixed")
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
WIRE_DTYPES = PRECISIONS = ("fp32", "bf16", "fp16")
SCHEDULES = ("fixed", "auto", "serial")
SCHEDULE_CHECKS = ("error", "warn")


@dataclasses.dataclass(frozen=True)
class LossScale:
    """How a dynamic loss scale changes.

    Attributes:
        init: value to start from.
        growth_factor, growth_interval: multiply by the one after as many finite steps as the other.
        backoff_factor, patience: multiply by the one after as many steps in a row with a non-finite gradient.
        min_scale: it is an error to fall below.
        max_scale: where growth ends.
    """

    init: float = 2.0**16
    growth_factor: float = 2.0
    growth_interval: int = 2000
    backoff_factor: float = 0.5
    patience: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**127

    def __post_init__(self) -> None:
        for name in ("init", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            _check_positive_number(f"loss_scale.{name}", getattr(self, name))
        for name in ("growth_interval", "patience"):
            _check_count(f"loss_scale.{name}", getattr(self, name))
        if not self.growth_factor >= 1 > self.backoff_factor:
            raise ValueError(
                f"option 'loss_scale': got growth_factor={self.growth_factor}, backoff_factor="
                f"{self.backoff_factor}; expected 1 or more, and less than 1"
            )
        if not self.min_scale <= self.init <= self.max_scale <= FLOAT32_MAX:
            raise ValueError(
                f"option 'loss_scale': got min_scale={self.min_scale:g}, init={self.init:g}, max_scale="
                f"{self.max_scale:g}; expected them in this order, in the range of float32"
            )

    @classmethod
    def parse(cls, value: Any) -> LossScale | float | None:
        """`"none"` → None; a number → itself; `"dynamic"` or a mapping of fields → a `LossScale`."""
        if value == "none":
            return None
        if value == "dynamic" or isinstance(value, LossScale):
            return cls() if value == "dynamic" else value
        if isinstance(value, Mapping):
            _check_keys(cls, value, "option 'loss_scale': unknown key")
            return cls(**value)
        if isinstance(value, str):
            raise ValueError(
                f"option 'loss_scale': got {value!r}{nearest(value, ('none', 'dynamic'))}"
            )
        _check_positive_number("loss_scale", value)
        return float(value)


@dataclasses.dataclass(frozen=True)
class Watching:
    """How gradient norms are judged: by windows of steps, each norm in one.

    Attributes:
        window: steps to a window.
        ratio: a window is unsteady if the standard deviation of its norms is more than this times their mean.
        times: after as many unsteady windows in a row the limit of the norm is lowered.
        decay: multiply the limit by it then.
    """

    window: int = 50
    ratio: float = 0.45
    times: int = 3
    decay: float = 0.92

    def __post_init__(self) -> None:
        _check_count("watch.window", self.window)
        _check_count("watch.times", self.times)
        _check_positive_number("watch.ratio", self.ratio)
        _check_positive_number("watch.decay", self.decay)
        if self.window < 2 or self.decay > 1:
            raise ValueError(
                f"option 'watch': got window={self.window}, decay={self.decay}; expected 2 or more steps, and "
                "at most 1"
            )

    @classmethod
    def parse(cls, value: Any) -> Watching | None:
        """None → None; a mapping of fields → a `Watching`."""
        if value is None or isinstance(value, Watching):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"option 'watch': got {value!r}; expected a mapping, {{}} for the defaults"
            )
        _check_keys(cls, value, "option 'watch': unknown key")
        return cls(**value)


@dataclasses.dataclass(frozen=True)
class Hardening:
    """Options of the `hardened` backend.

    Attributes:
        process_group: a `torch.distributed.ProcessGroup` or its registered name; `None` is the default
            group once `torch.distributed` is initialised, and no communication before.
        reduce: `"mean"` or `"sum"` of the gradients over the ranks.
        reduce_dtype: dtype on the wire, `"fp32"`, `"bf16"` or `"fp16"`; `None` keeps each gradient's own.
        reduce_order: in which order gradients that are sent as they are are added up: `"any"`, or `"fixed"`, by
            rank, so that sums don't depend on how gradients were bucketed (one collective more a bucket).
        bucket_mb: target size of a bucket in MiB (2**20 bytes) of gradient.
        precision: dtype of products and what may follow them, `"fp32"` (as the program says), `"bf16"` or
            `"fp16"`; parameters, gradients and outputs keep their dtypes.
        precision_rules: mapping that overrides the table of operators: `{"aten.exp": "infer", "head.*":
            "deny"}`, by operator or by a pattern for qualified module names.
        loss_scale: `"none"`, `"dynamic"`, a number, or a mapping of the fields of `LossScale` (dynamic).
        clip_norm: the limit of the global 2-norm of a model's gradients, which are scaled down to it; `None`
            leaves them alone.
        watch: mapping of the fields of `Watching`; `None` does not watch the norm.
        compression: of the gradients on the wire: `"none"`, a scheme (`"int8"`, `"topk"`, …), a mapping with
            its parameters (`{"scheme": "topk", "ratio": 0.01}`), or a mapping of parameter-name patterns to
            schemes. See `fxpasses.compression.Scheme`.
        faults: to inject: `"bitflip{bit=30,where=gradient:layers.3.*,rank=1,step=20}"`, several separated by
            `;`, or a list. See `fxpasses.faults.spec.Fault`.
        guards: against silent corruption: `"products,payloads,on=skip"`, a mapping, or `"all"`. See
            `fxpasses.guards.option.Guards`.
        accumulate: micro-batches (`backward()` calls) to a step; only each N-th reduces, the sum of all N.
        schedule: of what is sent and decoded beside what is computed: `"fixed"` (sent at once, awaited behind
            the last computation), `"auto"` (planned, and with it the sizes of buckets and which of them are
            compressed) or `"serial"` (awaited at once, for comparison).
        schedule_check: what happens if the generated code does not keep that order: `"error"` or `"warn"`.
        machine: mapping of the fields of `fxpasses.schedule.machine.Machine`, which `"auto"` plans with; the
            same on all ranks.
        passes: pipeline string, `"bucketing{mb=25},gradient_sync"`; `None` is the pipeline that the
            other options imply. `fxpasses passes` lists what can stand in it.
        dump: folder that receives the graph after each pass; `None`: what FXPASSES_DUMP in the
            environment says.
        profile: TOML file with these same keys; options given explicitly win over it.
    """

    process_group: Any = None
    reduce: str = "mean"
    reduce_dtype: str | None = None
    reduce_order: str = ANY
    bucket_mb: float = 25.0
    precision: str = "fp32"
    precision_rules: Mapping[str, str] | str = ""
    loss_scale: Any = "none"
    clip_norm: float | None = None
    watch: Any = None
    compression: Any = "none"
    faults: Any = ""
    guards: Any = ""
    accumulate: int = 1
    schedule: str = "fixed"
    schedule_check: str = "error"
    machine: Mapping[str, Any] | str = ""
    passes: str | None = None
    dump: str | os.PathLike[str] | None = None
    profile: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _check_choice("reduce", self.reduce, REDUCTIONS)
        if self.reduce_dtype is not None:
            _check_choice("reduce_dtype", self.reduce_dtype, WIRE_DTYPES)
        _check_choice("reduce_order", self.reduce_order, ORDERS)
        _check_positive_number("bucket_mb", self.bucket_mb)
        _check_count("accumulate", self.accumulate)
        _check_choice("precision", self.precision, PRECISIONS)
        LossScale.parse(self.loss_scale)
        if self.clip_norm is not None:
            _check_positive_number("clip_norm", self.clip_norm)
        Watching.parse(self.watch)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("schedule_check", self.schedule_check, SCHEDULE_CHECKS)
        object.__setattr__(self, "machine", _machine_text(self.machine))
        object.__setattr__(self, "precision_rules", _rules_text(self.precision_rules))
        object.__setattr__(self, "compression", _compression_text(self.compression))
        object.__setattr__(self, "faults", _faults_text(self.faults))
        object.__setattr__(self, "guards", _guards_text(self.guards))
        if self.passes is not None and not isinstance(self.passes, str):
            raise ValueError(f"option 'passes': expected a string, got {self.passes!r}")
        for name in ("dump", "profile"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise ValueError(f"option {name!r}: expected a path, got {value!r}")
        _check_process_group(self.process_group)

    @property
    def loss_scale_in_graph(self) -> float | str:
        """What the graph holds of the loss scale: a number (0 for none), or `"dynamic"`."""
        scale = LossScale.parse(self.loss_scale)
        return "dynamic" if isinstance(scale, LossScale) else scale or 0.0

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Hardening:
        """Build from the mapping given to `torch.compile(options=...)`, over the profile it may name.

        Raises:
            ValueError: for an unknown key, a value out of range, or a profile that can't be read.
        """
        options = dict(options or {})
        _check_keys(cls, options, "unknown option")
        profile = options.get("profile")
        if profile is None:
            return cls(**options)
        settings = _read_profile(profile)
        cls(**options)  # what is wrong with these is not the profile's fault
        try:
            return cls(**{**settings, **options})
        except ValueError as error:
            raise ValueError(f"in profile {os.fspath(profile)!r}: {error}") from error


def nearest(word: str, known: Any) -> str:
    """`"; did you mean 'x'?"` for the closest of `known`, or a list of all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _check_keys(cls: type[Any], settings: Mapping[str, Any], what: str) -> None:
    known = {field.name for field in dataclasses.fields(cls)}
    for key in settings:
        if key not in known:
            raise ValueError(f"{what} {key!r}{nearest(str(key), known)}")


def _check_choice(option: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"option {option!r}: got {value!r}{nearest(str(value), choices)}")


def _check_positive_number(option: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"option {option!r}: got {value!r}; expected a positive number")


def _check_count(option: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"option {option!r}: got {value!r}; expected a whole number, 1 or more")


def _rules_text(rules: Any) -> str:
    """The rules as they stand in a pipeline string."""
    if isinstance(rules, str):
        return rules
    if not isinstance(rules, Mapping):
        raise ValueError(f"option 'precision_rules': got {rules!r}; expected a mapping")
    return ";".join(f"{quoted(str(pattern))}={kind}" for pattern, kind in rules.items())


def _compression_text(value: Any) -> str:
    from fxpasses.compression import compression_text

    return compression_text(value)


def _machine_text(value: Any) -> str:
    from fxpasses.schedule.machine import machine_text

    return machine_text(value)


def _faults_text(value: Any) -> str:
    from fxpasses.faults.spec import faults_text

    return faults_text(value)


def _guards_text(value: Any) -> str:
    from fxpasses.guards.option import guards_text

    return guards_text(value)


def _check_process_group(value: Any) -> None:
    if value is None or isinstance(value, str):
        return
    import torch.distributed as dist

    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("option 'process_group': this process is not a member of the group given")

    if not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        raise ValueError(
            f"option 'process_group': got {value!r}; expected a torch.distributed.ProcessGroup or its name"
        )


def _read_profile(path: Any) -> dict[str, Any]:
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"option 'profile': expected a path, got {path!r}")
    path = os.fspath(path)
    try:
        settings = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"option 'profile': can't read {path!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"option 'profile': {path!r} is not TOML: {error}") from error
    _check_keys(Hardening, settings, f"unknown key in profile {path!r}:")
    if "profile" in settings:
        raise ValueError(f"option 'profile': {path!r} names another profile; that is not supported")
    return settings
