"""Option `compression`: what it takes, what it refuses, how it stands in a pipeline string."""

from __future__ import annotations

import pytest

from fxpasses.compression import SCHEMES, Scheme, adapts, compression_text, parse_rules, scheme_of
from fxpasses.config import Hardening


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("none", ""),
        ({"scheme": "none"}, ""),
        ("int4", "int4"),
        ("bf16", "bf16"),
        ({"scheme": "int8"}, "int8"),
        ({"scheme": "topk", "ratio": 0.05}, "topk:ratio=0.05"),
        (
            {"scheme": "int4", "group": 64, "symmetric": False, "rotate": True, "second_bits": 4},
            "int4:group=64:symmetric=false:rotate=true:second_bits=4",
        ),
        (
            {"scheme": "int8", "stochastic": True, "feedback": "ef21"},
            "int8:stochastic=true:feedback=ef21",
        ),
        ({"scheme": "topk", "momentum": 0.9}, "topk:momentum=0.9"),
        ({"scheme": "topk", "warmup": 100}, "topk:warmup=100"),
        ({"scheme": "powersgd", "rank": 2}, "powersgd:rank=2"),
        ("adaptive", "adaptive"),
        (
            {"scheme": "adaptive", "levels": ["int8", "topk"], "policy": "budget", "ratio": 0.1},
            "adaptive:levels=int8/topk:policy=budget:ratio=0.1",
        ),
        ({"*": "int4", "*.bias": "none"}, "*=int4;*.bias=none"),
        ({"head.*": {"scheme": "topk", "feedback": False}}, "head.*=topk:feedback=false"),
        ({"*.bias": "none"}, ""),
        ("topk:ratio=0.05", "topk:ratio=0.05"),
        ("*=int4; *.bias = none", "*=int4;*.bias=none"),
    ],
)
def test_every_form_has_one_text_that_is_read_back(value, text):
    assert compression_text(value) == text == Hardening(compression=value).compression
    assert compression_text(text or "none") == text


def test_the_last_pattern_that_matches_wins():
    rules = parse_rules("*=int4;*.bias=none;head.*=int8:group=64")
    found = {name: scheme_of(name, rules) for name in ("a.weight", "a.bias", "head.bias")}
    assert found == {
        "a.weight": Scheme("int4"),
        "a.bias": Scheme("none"),
        "head.bias": Scheme("int8", group=64),
    }
    assert scheme_of("a", parse_rules("b=int4")) == Scheme("none")


def test_an_adaptive_scheme_stands_for_its_level():
    rules = parse_rules("*=adaptive:levels=int8/topk:ratio=0.1:group=64;head=int4")
    levels = (("a", "topk"), ("head", "topk"))
    assert scheme_of("a", rules, levels) == Scheme("topk", ratio=0.1)
    assert scheme_of("b", rules, levels) == Scheme("none")
    assert scheme_of("b", rules) == Scheme("int8", group=64)
    assert scheme_of("head", rules, levels) == Scheme("int4")
    assert adapts("a=adaptive;b=int4") and not adapts("b=int4") and not adapts("")


@pytest.mark.parametrize(
    ("ratio", "stages"),
    [
        (0.001, [0.25, 0.0629, 0.0158, 0.00398]),  # those of the paper, rounded
        (0.01, [0.25, 0.0855, 0.0292]),
        (0.0625, [0.25]),
        (0.2, [0.25]),
        (0.0101234, [0.25, 0.0858, 0.0295]),
    ],
)
def test_a_warm_up_falls_from_a_quarter_at_most_fourfold_a_stage(ratio, stages):
    scheme = Scheme("topk", ratio=ratio, momentum=0.9, warmup=7)
    levels = [scheme.level(name) for name in scheme.level_names]
    assert levels == [Scheme("topk", ratio=r, momentum=0.9) for r in (*stages, ratio)]


def test_a_warm_up_stands_for_its_stage_and_then_for_its_end():
    rules = parse_rules("*=topk:ratio=0.02:warmup=10;head=int4")
    levels = (("a", "topk:ratio=0.25"), ("head", "topk:ratio=0.25"))
    assert scheme_of("a", rules, levels) == Scheme("topk", ratio=0.25)
    assert scheme_of("b", rules, levels) == scheme_of("a", rules) == Scheme("topk", ratio=0.02)
    assert scheme_of("head", rules, levels) == Scheme("int4")
    assert not adapts("topk:warmup=10")


def test_what_has_feedback():
    schemes = {name: Scheme(name).has_residual for name in SCHEMES}
    assert [name for name, has in schemes.items() if has] == ["int8", "int4", "topk", "powersgd"]
    assert not Scheme("topk", feedback=False).has_residual


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("int5", "got 'int5'; did you mean 'int"),
        (7, "got 7; expected a scheme"),
        ({"scheme": 7}, "got 7"),
        ({"*": "top"}, "got 'top'; did you mean 'topk'?"),
        ({"scheme": "topk", "ratio": 0}, "scheme 'topk': got ratio=0; expected a number above 0"),
        ({"scheme": "topk", "ratio": 1.5}, "got ratio=1.5"),
        ({"scheme": "topk", "ratio": float("nan")}, "got ratio=nan"),
        ({"scheme": "topk", "ratio": True}, "got ratio=True"),
        ({"scheme": "int8", "group": 100}, "got group=100; expected a power of two"),
        ({"scheme": "int8", "group": 0}, "got group=0"),
        ({"scheme": "int8", "group": 64.0}, "got group=64.0"),
        ({"scheme": "int4", "group": 16, "rotate": True}, "got group=16; expected at least 32"),
        ({"scheme": "int4", "second_bits": 2}, "got second_bits=2; expected 8 or 4"),
        ({"scheme": "int8", "symmetric": 1}, "got symmetric=1; expected true or false"),
        ({"scheme": "int8", "stochastic": "yes"}, "got stochastic='yes'; expected true or false"),
        (
            {"scheme": "int8", "feedback": "ef20"},
            "got feedback='ef20'; expected true, false or ef21",
        ),
        ({"scheme": "powersgd", "feedback": "ef21"}, "got feedback='ef21'; expected true or false"),
        ({"scheme": "powersgd", "rank": 0}, "got rank=0; expected a whole number"),
        ({"scheme": "topk", "momentum": 1}, "got momentum=1; expected a number from 0"),
        ({"scheme": "topk", "warmup": -1}, "got warmup=-1; expected a whole number of backwards"),
        ({"scheme": "topk", "warmup": 0.5}, "got warmup=0.5"),
        ({"scheme": "topk", "warmup": True}, "got warmup=True"),
        (
            {"scheme": "topk", "ratio": 0.25, "warmup": 9},
            "got warmup=9; expected 0 with a ratio of",
        ),
        ({"scheme": "int8", "warmup": 9}, "scheme 'int8' has no 'warmup'"),
        ({"scheme": "topk", "momentum": 0.9, "feedback": False}, "expected true or ef21 with"),
        (
            {"scheme": "adaptive", "levels": "int4"},
            "got levels='int4'; expected two or more of int8",
        ),
        ({"scheme": "adaptive", "levels": ["int4", "fp16"]}, "got levels='int4/fp16'"),
        ({"scheme": "adaptive", "levels": ["int4", "int4"]}, "got levels='int4/int4'"),
        ({"scheme": "adaptive", "levels": 4}, "got levels=4"),
        ({"scheme": "adaptive", "policy": "nrom"}, "got policy='nrom'; expected norm or budget"),
        ({"scheme": "adaptive", "threshold": 0}, "got threshold=0; expected a number above 0"),
        ({"scheme": "adaptive", "flush": 1}, "got flush=1; expected a whole number of backwards"),
        ({"scheme": "adaptive", "flush": -2}, "got flush=-2"),
        ({"scheme": "adaptive", "flush": 2.5}, "got flush=2.5"),
        ({"scheme": "adaptive", "budget": 0}, "got budget=0"),
        ({"scheme": "int8", "ratio": 0.1}, "scheme 'int8' has no 'ratio'"),
        ({"scheme": "topk", "ratoi": 0.1}, "scheme 'topk' has no 'ratoi'; did you mean 'ratio'?"),
        ({"scheme": "bf16", "group": 64}, "scheme 'bf16' has no 'group'; it takes none"),
        ("topk:ratio=much", "got ratio='much'"),
        ("topk:ratio", "got ratio=''"),
    ],
)
def test_bad_values_are_named(value, words):
    with pytest.raises(ValueError) as caught:
        Hardening(compression=value)
    assert str(caught.value).startswith("option 'compression': ") and words in str(caught.value)
