"""What is told from gradient norms across steps."""

from __future__ import annotations

import math
import statistics
import warnings

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.config import Hardening, Watching
from fxpasses.watch import Event, Series, Watch
from tests.multirank import run_ranks

BACKEND = "hardened_aot_eager"
UNSTEADY, STEADY = [1.0, 9.0], [5.0, 5.0]


def seen(norms: list[float], **settings) -> tuple[Watch, list[int]]:
    """A watch that has seen these norms, and the steps at which the limit was to be lowered."""
    watch = Watch(Watching(**{"window": 2, **settings}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = [i for i, norm in enumerate(norms, 1) if watch.observe(norm)]
    return watch, lowered


def test_a_few_unsteady_windows_in_a_row_lower_the_limit():
    assert seen(UNSTEADY * 3)[1] == [6]
    assert seen(UNSTEADY * 6)[1] == [6, 12]
    assert seen(UNSTEADY * 2 + STEADY + UNSTEADY * 2)[1] == []
    assert seen(UNSTEADY * 2, times=2)[1] == [4]


def test_unsteady_is_a_matter_of_the_ratio():
    norms = [1.0, 2.0, 3.0, 4.0]
    ratio = statistics.pstdev(norms) / statistics.fmean(norms)
    assert seen(norms, window=4, times=1, ratio=ratio - 0.01)[1] == [4]
    assert seen(norms, window=4, times=1, ratio=ratio + 0.01)[1] == []
    assert 0.44 < ratio < 0.45 and seen(norms, window=4, times=1)[1] == []  # 0.45 is the default


def test_a_single_spike_makes_a_single_window_unsteady():
    assert seen([1.0] * 7 + [1000.0] + [1.0] * 8, window=4, times=2)[1] == []


def test_a_spike_is_reported_with_its_step():
    watch, _ = seen([1.0, 1.0, 1.0, 4.9, 1.0])
    assert not watch.events
    with pytest.warns(
        UserWarning, match=r"step 6: the gradient norm is 60, more than 5 times .* mean of"
    ):
        watch.observe(60.0)
    assert list(watch.events) == [Event(6, "spike", 60.0)]


def test_nothing_is_a_spike_before_the_first_window_is_over():
    assert not seen([1.0, 100.0])[0].events


def test_norms_that_are_not_finite_count_for_nothing_and_are_reported_without_a_loss_scale():
    watch, _ = seen([1.0, 1.0])
    watch.observe(math.inf, 1024.0)
    assert not watch.events
    with pytest.warns(UserWarning, match="step 4: the gradient norm is nan"):
        watch.observe(math.nan)
    assert watch.step == 4 and watch.norms == Series(2, 1.0, [1.0, 1.0])
    assert watch.loss_scales == Series(1, 1024.0, [1024.0])


def test_the_mean_is_plain_first_and_then_moves():
    watch, _ = seen([1.0, 2.0, 3.0], window=9)
    assert watch.norms.mean == pytest.approx(2.0) and watch.norms.window == [1.0, 2.0, 3.0]
    watch, _ = seen([1.0] * 50 + [2.0], window=9)
    assert watch.norms.mean == pytest.approx(1.2)  # 2 / (9 + 1) of the way
    assert watch.norms.window == [1.0] * 8 + [2.0]


def test_state():
    watch, _ = seen(UNSTEADY * 2 + [1.0])
    again = Watch(Watching(window=2))
    again.load_state_dict(watch.state_dict())
    assert again.state_dict() == watch.state_dict()
    assert again.observe(9.0)


def test_peak_memory():
    peak = seen([])[0].peak_memory_bytes
    held = torch.ones(2**25)  # 128 MiB
    assert peak > 2**26 and seen([])[0].peak_memory_bytes >= held.numel() * 4


def norm_of(model: nn.Module) -> float:
    return fxpasses.runtime(model).last_step.gradient_norm.item()


def stepped(compiled, model: nn.Module, gradients: list[float], scale: float = 1.0) -> list[float]:
    """Take steps of given gradients; what each was clipped to."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for value in gradients:
        compiled(torch.full((1, 1), value)).sum().backward()
        assert norm_of(model) == pytest.approx(value)
        found.append(model.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


WATCH = {"window": 2, "times": 2, "decay": 0.5}


def watched(**options):
    model = nn.Linear(1, 1, bias=False)
    options = {"clip_norm": 0.5, "watch": WATCH, **options}
    return model, torch.compile(model, backend=BACKEND, options=options)


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("backend", [BACKEND, "hardened"])
def test_the_limit_falls_without_a_recompilation(backend):
    model = nn.Linear(1, 1, bias=False)
    compiled = torch.compile(model, backend=backend, options={"clip_norm": 0.5, "watch": WATCH})
    torch._dynamo.utils.counters.clear()
    found = stepped(compiled, model, UNSTEADY * 4 + STEADY)
    assert found == pytest.approx([0.5] * 4 + [0.25] * 4 + [0.125] * 2, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    watch = fxpasses.runtime(model).watch
    assert [e for e in watch.events if e.what == "decay"] == [
        Event(4, "decay", 0.25),
        Event(8, "decay", 0.125),
    ]


def test_lowering_the_limit_is_said():
    model, compiled = watched()
    with pytest.warns(UserWarning, match="step 4: 2 windows .* were unsteady; 'clip_norm' is 0.25"):
        stepped(compiled, model, UNSTEADY * 2)


@pytest.mark.filterwarnings("ignore:step")
def test_it_is_resumed(tmp_path):
    model, compiled = watched()
    stepped(compiled, model, UNSTEADY * 3)
    torch.save(fxpasses.runtime(model).state_dict(), tmp_path / "state.pt")
    torch._dynamo.reset()
    model, compiled = watched()
    runtime = fxpasses.runtime(model)
    runtime.load_state_dict(torch.load(tmp_path / "state.pt"))  # before the first forward
    assert stepped(compiled, model, [1.0]) == pytest.approx([0.25], rel=1e-5)
    assert runtime.watch.step == 7
    assert stepped(compiled, model, [9.0, 1.0]) == pytest.approx([0.25, 0.125], rel=1e-5)
    runtime.load_state_dict(torch.load(tmp_path / "state.pt"))  # later as well
    assert runtime.clipping.limit == 0.25 and runtime.watch.step == 6


def test_without_it_nothing_is_kept():
    model, compiled = watched(watch=None)
    assert stepped(compiled, model, UNSTEADY * 4) == pytest.approx([0.5] * 8, rel=1e-5)
    runtime = fxpasses.runtime(model)
    assert runtime.watch is None and "watch" not in runtime.state_dict()


def test_the_loss_scale_is_watched_too():
    model, compiled = watched(loss_scale={"init": 8.0, "growth_interval": 1})
    stepped(compiled, model, [1.0, 1.0, 1.0])
    assert fxpasses.runtime(model).watch.loss_scales.window == [32.0, 64.0]


def test_two_optimizers_make_one_step():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    compiled = torch.compile(model, backend=BACKEND, options={"clip_norm": 1.0, "watch": {}})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in model]
    compiled(torch.ones(1, 1)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert fxpasses.runtime(model).watch.step == 1


def on_ranks(rank: int) -> tuple[list[float], list[Event], int]:
    model, compiled = watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for value in UNSTEADY * 4:
            # Only their mean is `value`.
            compiled(torch.full((1, 1), value + (1 if rank else -1))).sum().backward()
            found.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    count = sum(str(w.message).startswith("step") for w in said)
    return found, list(fxpasses.runtime(model).watch.events), count


def test_ranks_decide_alike_and_one_of_them_says_so():
    (first, events, said), (second, others, silent) = run_ranks(on_ranks, 2)
    assert first == second == pytest.approx([0.5] * 4 + [0.25] * 4, rel=1e-5)
    assert events == others and len(events) == 2 and (said, silent) == (2, 0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "option 'watch': got True; expected a mapping, {} for the defaults"),
        ({"windows": 3}, "option 'watch': unknown key 'windows'; did you mean 'window'"),
        ({"window": 1}, "got window=1, decay=0.92; expected 2 or more steps"),
        ({"decay": 1.5}, "decay=1.5; expected 2 or more steps, and at most 1"),
        ({"ratio": 0}, "option 'watch.ratio': got 0; expected a positive number"),
        ({"times": 0}, "option 'watch.times': got 0; expected a whole number"),
    ],
)
def test_wrong_options(value, words):
    with pytest.raises(ValueError, match=words):
        Hardening(clip_norm=1.0, watch=value)


@pytest.mark.parametrize("value", [0, -1.0, "1", True, math.inf])
def test_wrong_limits(value):
    with pytest.raises(ValueError, match="option 'clip_norm': got .*; expected a positive number"):
        Hardening(clip_norm=value)
