"""Option `faults`: how it is read, and what is said about what can't be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.config import Hardening
from fxpasses.faults.spec import MODELS, PHASES, Fault, check_ranks, faults_text, parse_faults

ISSUE = "bitflip{bit=30,where=gradient:layers.3.*,rank=1,step=20}"


def test_a_fault_is_read():
    (fault,) = parse_faults(ISSUE)
    assert fault == Fault("bitflip", "gradient", "layers.3.*", rank=1, first=20, last=20, bit=(30,))


def test_several_are_separated_by_semicolons_or_a_list():
    assert len(parse_faults(ISSUE + "; nan{where=forward}")) == 2
    assert faults_text([ISSUE, "nan{where=forward}"]) == faults_text(ISSUE + ";nan{where=forward}")


def test_nothing_is_no_fault():
    assert faults_text("") == faults_text(None) == faults_text([]) == Hardening().faults == ""


@pytest.mark.parametrize(
    ("step", "active"),
    [("20", [20]), ("20-22", [20, 21, 22]), ("22-", [22, 23]), ("none", [])],
)
def test_steps(step, active):
    (fault,) = parse_faults(f"zero{{step={step}}}")
    assert [s for s in range(18, 24) if fault.is_active(s)] == active


def test_where_selects_by_phase_name_and_operator():
    (fault,) = parse_faults("zero{where=forward:layers.*.mlp,op=aten.mm}")
    assert fault.selects("forward", ["layers.1", "layers.1.mlp"], "mm")
    assert not fault.selects("backward", ["layers.1.mlp"], "mm")
    assert not fault.selects("forward", ["layers.1.mlp"], "addmm")
    assert not fault.selects("forward", ["layers.1"], "mm")


def test_a_name_may_hold_what_faults_are_separated_by():
    first, second = parse_faults("zero{where=gradient:a[,]b=c,step=3};sign{where=gradient:x[;]y}")
    assert first.selects("gradient", ["a,b=c"], "") and first.last == 3
    assert second.selects("gradient", ["x;y"], "") and not second.selects("gradient", ["x"], "")
    assert parse_faults(first.text) == (first,)


counts = st.integers(1, 30)
models = st.sampled_from(["bitflip", "zero", "scale", "truncate", "nan"])


@given(models, st.sampled_from(PHASES), st.none() | counts, counts, st.none() | counts, counts)
def test_the_text_of_a_fault_is_read_as_the_same(model, phase, rank, first, last, n):
    own = {
        "bitflip": {"bit": (n, n + 1), "index": n},
        "zero": {"index": n},
        "scale": {"factor": n / 4},
        "truncate": {"bits": n, "probability": 1 / n},
        "nan": {},
    }[model]
    if last is not None and last < first:
        first, last = 1, 0  # the one way to write no step
    fault = Fault(model, phase, "a.*", "mm", rank, first, last, seed=n, **own)
    assert parse_faults(fault.text) == (fault,)
    assert parse_faults(faults_text(fault.text)) == (fault,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bitflop{bit=3}", "unknown model 'bitflop'; did you mean 'bitflip'?"),
        ("bitflip{bits", "can't read 'bitflip{bits'"),
        ("bitflip{bite=3}", "has no 'bite'; did you mean 'bit'?"),
        ("zero{bit=3}", "has no 'bit'"),
        ("bitflip{bit=x}", "bit=x: expected a whole number, 0 or more"),
        ("bitflip{where=gradients}", "did you mean 'gradient'?"),
        ("bitflip{step=3-x}", "expected a step (20), steps (20-30)"),
        ("truncate{probability=2}", "expected a number from 0.0 to 1.0"),
        ("stuck{value=1}", "needs the bit that is stuck"),
        ("stale{where=gradient}", "'stale' happens to collectives"),
    ],
)
def test_what_can_not_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=r"^option 'faults'") as caught:
        Hardening(faults=text)
    assert message in str(caught.value)


def test_another_type_is_refused():
    with pytest.raises(ValueError, match="option 'faults': got 3; expected a string such as"):
        Hardening(faults=3)


def test_a_rank_outside_the_world_is_refused():
    check_ranks(ISSUE, 2)
    with pytest.raises(ValueError, match=r"rank 1 is outside the world, which has ranks 0 to 0"):
        check_ranks(ISSUE, 1)


def test_every_model_can_be_written_alone():
    for model in MODELS:
        body = "bit=1" if model == "stuck" else ""
        where = "payload" if model in ("stale", "missing") else "gradient"
        (fault,) = parse_faults(f"{model}{{where={where},{body}}}")
        assert parse_faults(fault.text) == (fault,)
