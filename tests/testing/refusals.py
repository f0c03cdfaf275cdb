"""What passes refuse: with a `ValueError` that names the option, before they change anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.cast import Cast
from fxpasses.passes.clip_norm import ClipNorm
from fxpasses.passes.compress import Compress
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.loss_scale import LossScaling
from fxpasses.passes.participation import Participation
from fxpasses.passes.schedule import Scheduling
from fxpasses.testing.check import run_over, settings
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step

_WORDS = st.text("abcdefghijklmnop", min_size=1, max_size=8)
_NOT_POSITIVE = st.one_of(
    st.floats(max_value=0.0), st.just(math.inf), st.just(math.nan), st.sampled_from((0.0, -0.0))
)
# (pass, option) → values that are wrong, and some that are right.
OPTIONS: dict[tuple[type[Pass], str], tuple[st.SearchStrategy[Any], tuple[Any, ...]]] = {
    (Bucketing, "mb"): (_NOT_POSITIVE, (None, 1e-300, 1, 25.0, 1e300)),
    (ClipNorm, "max_norm"): (_NOT_POSITIVE, (None, 1e-300, 1, 1e300)),
    (GradientSync, "reduce"): (_WORDS, (None, "mean", "sum")),
    (GradientSync, "dtype"): (_WORDS, (None, "fp32", "bf16", "fp16")),
    (GradientSync, "order"): (_WORDS, (None, "any", "fixed")),
    (Cast, "dtype"): (_WORDS, (None, "fp32", "bf16", "fp16")),
    (Cast, "rules"): (_WORDS, (None, "", "aten.exp=infer", "a*=deny;aten.mul=allow")),
    (Scheduling, "machine"): (_WORDS, (None, "", "flops=1e9", "bandwidth=1e7;latency=0.0")),
    (Compress, "scheme"): (_WORDS, (None, "", "int8", "*=topk:ratio=0.5")),
}


def wrong_options(examples: int) -> None:
    """A value that is none is refused, with the option's name; one that is, is taken."""
    for (cls, option), (wrong, right) in OPTIONS.items():
        for value in right:
            assert getattr(cls(**{option: value}), option) == value
        _refused(cls, option, wrong, max(examples // len(OPTIONS), 3))


def _refused(cls: type[Pass], option: str, wrong: st.SearchStrategy[Any], examples: int) -> None:
    known = OPTIONS[cls, option][1]

    @settings(examples)
    @given(wrong.filter(lambda value: value not in known))
    def search(value: Any) -> None:
        message = refusal(lambda: cls(**{option: value}))
        assert message.startswith("option '"), message
        assert str(value) in message, f"{message} does not say what it got"

    search()


def refusal(do: Callable[[], Any]) -> str:
    """The message with which something is refused."""
    try:
        do()
    except ValueError as error:
        return str(error)
    raise AssertionError("what is wrong went through")


def _environment(world: int, **others: Any) -> dict[str, Any]:
    found = {"world": world, "group": "world", "layout": None, "bucket_mb": 1.0, "reduce": "mean"}
    return {**found, "reduce_dtype": None, **others}


def _graph(dtype: str = "float32", whole_step: bool = False) -> TrainingGraph:
    source = GradientGraph((Leaf((2,)),), (Step(dtype),), (1,), whole_step=whole_step)
    return source.build()


def places_of_passes() -> None:
    """What a pass can't do where it stands, it says there."""
    for world in (2, 3):
        message = refusal(lambda world=world: ClipNorm(max_norm=1.0, world=world).run(_graph()))
        assert "'clip_norm'" in message and "reduced" in message
    for alone in (1, None):  # one rank's gradients are as good as reduced
        assert ClipNorm(max_norm=1.0, world=alone).run(_graph()).changed
    message = refusal(lambda: ClipNorm(world=1).run(_graph()))
    assert "'clip_norm'" in message and "limit" in message
    graph = _graph()
    Bucketing(mb=1.0).run(graph)
    message = refusal(lambda: Participation(group="world").run(graph))
    assert "'participation'" in message and "'bucketing'" in message
    message = refusal(lambda: LossScaling(scale=2.0).run(_graph(whole_step=True)))
    assert "'loss_scale'" in message and "backward()" in message
    assert not LossScaling(scale=0.0).run(_graph(whole_step=True)).changed


def gradients_that_do_not_fit() -> None:
    """Sparse ones are not reduced; complex ones in their own dtype, and as they are."""
    graph = _graph()
    with graph.fake_mode:
        sparse = torch.empty(2, 2).to_sparse()
    graph.gradients()[0].node.meta["val"] = sparse
    message = refusal(lambda: Bucketing(mb=1.0).run(graph))
    assert "'layer0.weight'" in message and "dense" in message
    for dtype in ("fp32", "bf16", "fp16"):
        environment = _environment(2, reduce_dtype=dtype)
        message = refusal(lambda e=environment: run_over(GradientSync(), _graph("complex64"), e))
        assert "reduce_dtype" in message and dtype in message and "'layer0.weight'" in message
    for scheme in ("int8", "topk", "bf16"):
        one = Compress(scheme=scheme)
        message = refusal(lambda one=one: run_over(one, _graph("complex64"), _environment(2)))
        assert "'compression'" in message and scheme in message and "complex" in message
    run = run_over(GradientSync(), _graph("complex64"), _environment(2))
    assert run.reports[0].counts["collectives"] == 1


SINGLE = (places_of_passes, gradients_that_do_not_fit)
