"""Option `compression`: which scheme sends which parameter's gradient.

    "int4"                                            all of them
    {"scheme": "topk", "ratio": 0.01}                 with parameters
    {"*": "int4", "*.bias": "none", "head.*": "int8"} by patterns of qualified names; the last that matches wins

In a pipeline string: `topk:ratio=0.01` and `*=int4;*.bias=none;head.*=int8:group=64`.

`adaptive` stands for one of its levels, anew in each step, and top-k with a warm-up for one of its stages (see
`levels.py`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from typing import Any

from fxpasses.config import nearest
from fxpasses.patterns import partition, quoted, split

NONE, POWERSGD, ADAPTIVE = "none", "powersgd", "adaptive"
NORM, BUDGET = POLICIES = ("norm", "budget")
ESTIMATES = "ef21"  # a kind of feedback
# What each scheme can be told, besides its name.
_KEYS = {
    NONE: (),
    "bf16": (),
    "fp16": (),
    "int8": ("group", "symmetric", "stochastic", "feedback"),
    "int4": ("group", "symmetric", "stochastic", "feedback", "rotate", "second_bits"),
    "topk": ("ratio", "momentum", "warmup", "feedback"),
    POWERSGD: ("rank", "feedback"),
    ADAPTIVE: (
        *("levels", "policy", "threshold", "flush", "budget"),
        *("group", "rotate", "second_bits", "ratio", "rank"),
    ),
}
SCHEMES = tuple(_KEYS)
_LEVELS = ("int8", "int4", "topk", POWERSGD)  # they share one kind of residual
# A warm-up begins with this ratio, as many bytes as int8, and falls by this factor a stage, or a bit less.
_FIRST_RATIO, _FALL = 0.25, 4


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a gradient goes over the wire.

    Attributes:
        scheme: one of `SCHEMES`.
        group: (int8, int4) elements that share a scale, a power of two.
        symmetric: (int8, int4) no zero point.
        stochastic: (int8, int4) round at random: the error is zero on average.
        feedback: (int8, int4, topk, powersgd) true keeps what was lost as a residual, and sends it with the
            next gradient; "ef21" (not powersgd) sends differences to an estimate; false does neither.
        rotate: (int4) Hadamard rotation, against outliers.
        second_bits: (int4) bits of the second leg, from a shard's owner to all: 8 or 4.
        ratio: (topk) share of the elements that is sent, above 0 and at most 1.
        momentum: (topk) taken before elements are chosen, in place of the optimizer's own; with "ef21", of a
            moving average that is estimated; 0 for none.
        warmup: (topk) backwards in which the ratio falls, in a few stages, from a quarter to what it is then; 0
            for none. Lin et al., ICLR 2018, "Deep gradient compression", section 3.3.
        rank: (powersgd) columns of the two thin matrices that stand for a gradient.
        levels: (adaptive) schemes, from the one that loses least to the one that sends least: "int8/int4/topk".
        policy: (adaptive) "norm" takes the first level while the norm of the gradients changes, else the last;
            "budget" gives each layer the level with which all together send least within an error budget.
        threshold: (norm) by what share of its moving average the norm has to differ; from 1 on only growth can.
        flush: (norm) every so many backwards the first level is taken, which sends what the last one has held
            back; 0 for never.
        budget: (budget) of the gradients' squared norm the share that may be lost.
    """

    scheme: str = NONE
    group: int = 128
    symmetric: bool = True
    stochastic: bool = False
    feedback: bool | str = True
    rotate: bool = False
    second_bits: int = 8
    ratio: float = 0.01
    momentum: float = 0.0
    warmup: int = 0
    rank: int = 4
    levels: str = "int4/powersgd"
    policy: str = NORM
    threshold: float = 1.0
    flush: int = 3
    budget: float = 0.05

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(
                f"option 'compression': got {self.scheme!r}{nearest(str(self.scheme), SCHEMES)}"
            )
        if not _is_whole(self.group) or self.group < 1 or self.group & (self.group - 1):
            self._refuse("group", "a power of two, 128 for example")
        if self.rotate and self.group < 32:
            self._refuse("group", "at least 32 with rotate")
        if self.second_bits not in (4, 8):
            self._refuse("second_bits", "8 or 4")
        if not _is_number(self.ratio) or not 0 < self.ratio <= 1:
            self._refuse("ratio", "a number above 0 and at most 1")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            self._refuse("momentum", "a number from 0 to below 1")
        if self.momentum and not self.feedback:
            self._refuse("feedback", f"true or {ESTIMATES} with momentum")
        if not _is_whole(self.warmup) or self.warmup < 0:
            self._refuse("warmup", "a whole number of backwards, 0 for none")
        if self.warmup and self.ratio >= _FIRST_RATIO:
            self._refuse(
                "warmup", f"0 with a ratio of {_FIRST_RATIO} or more, which it begins with"
            )
        if not _is_whole(self.rank) or self.rank < 1:
            self._refuse("rank", "a whole number, 1 or more")
        if self.feedback == ESTIMATES and self.scheme == POWERSGD:
            self._refuse("feedback", "true or false")
        if not isinstance(self.feedback, bool) and self.feedback != ESTIMATES:
            self._refuse("feedback", f"true, false or {ESTIMATES}")
        self._check_levels()
        for key in ("symmetric", "stochastic", "rotate"):
            if not isinstance(getattr(self, key), bool):
                self._refuse(key, "true or false")

    def _check_levels(self) -> None:
        if isinstance(self.levels, list | tuple):
            object.__setattr__(self, "levels", "/".join(map(str, self.levels)))
        names = self.levels.split("/") if isinstance(self.levels, str) else []
        if len(names) < 2 or len(set(names)) < len(names) or not set(names) <= set(_LEVELS):
            self._refuse("levels", f"two or more of {', '.join(_LEVELS)}, such as int4/powersgd")
        if self.policy not in POLICIES:
            self._refuse("policy", " or ".join(POLICIES))
        if not _is_number(self.threshold) or not self.threshold > 0:
            self._refuse("threshold", "a number above 0")
        if not _is_whole(self.flush) or self.flush < 0 or self.flush == 1:
            self._refuse("flush", "a whole number of backwards from 2 on, or 0")
        if not _is_number(self.budget) or not 0 < self.budget < 1:
            self._refuse("budget", "a number above 0 and below 1")

    @property
    def level_names(self) -> tuple[str, ...]:
        """What it stands for, one at a time, in order; of a scheme that stays what it is nothing."""
        if self.scheme == ADAPTIVE:
            return tuple(self.levels.split("/"))
        if not self.warmup:
            return ()
        fall = self.ratio / _FIRST_RATIO
        stages = math.ceil(-math.log(fall, _FALL) - 1e-9)
        ratios = [f"{_FIRST_RATIO * fall ** (stage / stages):.3g}" for stage in range(stages)]
        return tuple(f"{self.scheme}:ratio={ratio}" for ratio in (*ratios, self.ratio))

    def level(self, name: str) -> Scheme:
        """The scheme of a level, which shares parameters with the others."""
        if self.scheme != ADAPTIVE:
            return dataclasses.replace(self, ratio=float(name.partition("=")[2]), warmup=0)
        shared = {key: getattr(self, key) for key in _KEYS[name] if key in _KEYS[ADAPTIVE]}
        return Scheme(name, **shared)

    def _refuse(self, key: str, wanted: str) -> None:
        raise ValueError(
            f"option 'compression': scheme {self.scheme!r}: got {key}={getattr(self, key)!r}; expected {wanted}"
        )

    @property
    def bits(self) -> int:
        return {"int8": 8, "int4": 4}[self.scheme]

    @property
    def has_residual(self) -> bool:
        return bool(self.feedback) and "feedback" in _KEYS[self.scheme]

    @property
    def text(self) -> str:
        """As in a pipeline string: what differs from the default."""
        default = Scheme(self.scheme)
        given = [
            f"{key}={_word(getattr(self, key))}"
            for key in _KEYS[self.scheme]
            if getattr(self, key) != getattr(default, key)
        ]
        return ":".join([self.scheme, *given])


Rules = tuple[tuple[str, Scheme], ...]
Levels = tuple[tuple[str, str], ...]  # parameters and their levels, where a scheme has some


def compression_text(value: Any) -> str:
    """The option as it stands in a pipeline string; empty where nothing is compressed.

    Raises:
        ValueError: naming what is wrong, what was got, and what would work.
    """
    return rules_text(parse_rules(value) if isinstance(value, str) else _rules_of(value))


def rules_text(rules: Rules) -> str:
    """Rules as they stand in a pipeline string; empty where nothing is compressed."""
    if all(scheme.scheme == NONE for _, scheme in rules):
        return ""
    if len(rules) == 1 and rules[0][0] == "*":
        return rules[0][1].text
    return ";".join(f"{pattern}={scheme.text}" for pattern, scheme in rules)


def parse_rules(text: str) -> Rules:
    """`"int4:group=64"` or `"*=int4;*.bias=none"` → pairs of pattern and scheme."""
    rules = []
    for item in filter(None, (part.strip() for part in split(text, ";"))):
        head, equals, rest = partition(item, "=")
        is_pattern = equals and len(split(head, ":")) == 1
        pattern, words = (head, rest) if is_pattern else ("*", item)
        name, *pairs = words.split(":")
        rules.append((pattern.strip(), _scheme(name.strip(), dict(map(_pair, pairs)))))
    return tuple(rules)


def scheme_of(parameter: str, rules: Rules, levels: Levels | None = None) -> Scheme:
    """The scheme of a parameter.

    Args:
        levels: of schemes that have some. A parameter that is not in it is sent as it is if that is adaptive,
            else as after the warm-up. None, where nobody has chosen, is the first level of an adaptive scheme.
    """
    scheme = option_of(parameter, rules)
    if not scheme.level_names:
        return scheme
    name = dict(levels or ()).get(parameter)
    if scheme.scheme != ADAPTIVE:
        return scheme.level(name or scheme.level_names[-1])
    if levels is None:
        return scheme.level(scheme.level_names[0])
    return Scheme() if name is None else scheme.level(name)


def adapts(text: str) -> bool:
    """Whether any scheme of the option is adaptive."""
    return any(scheme.scheme == ADAPTIVE for _, scheme in parse_rules(text))


def option_of(parameter: str, rules: Rules) -> Scheme:
    """What the option says of a parameter."""
    for pattern, scheme in reversed(rules):
        if fnmatch.fnmatchcase(parameter, pattern):
            return scheme
    return Scheme()


def _rules_of(value: Any) -> Rules:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"option 'compression': got {value!r}; expected a scheme ({', '.join(SCHEMES)}), a mapping with "
            "the key 'scheme', or a mapping of parameter-name patterns to schemes"
        )
    if "scheme" in value:
        return (("*", _from_mapping(value)),)
    return tuple((quoted(str(pattern)), _from_value(x)) for pattern, x in value.items())


def _from_value(value: Any) -> Scheme:
    return _from_mapping(value) if isinstance(value, Mapping) else _scheme(value, {})


def _from_mapping(value: Mapping[str, Any]) -> Scheme:
    return _scheme(value.get("scheme"), {k: v for k, v in value.items() if k != "scheme"})


def _scheme(name: Any, options: dict[str, Any]) -> Scheme:
    known = _KEYS.get(name, ()) if isinstance(name, str) else ()
    scheme = Scheme(name) if not options or name not in SCHEMES else None
    for key in options:
        if key not in known:
            hint = nearest(key, known) if known else "; it takes none"
            raise ValueError(f"option 'compression': scheme {name!r} has no {key!r}{hint}")
    return Scheme(name, **options) if scheme is None else scheme


def _pair(text: str) -> tuple[str, Any]:
    key, _, word = (part.strip() for part in text.partition("="))
    if word in ("true", "false"):
        return key, word == "true"
    for kind in (int, float):
        try:
            return key, kind(word)
        except ValueError:
            continue
    return key, word


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
