"""Passes by name, and pipeline strings."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
import textwrap
import typing
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpasses import registry
from fxpasses.config import Hardening
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import FROM_GROUP, Pass, Report, from_environment
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.participation import Participation
from fxpasses.registry import parse_pipeline, passes, register_pass

names = st.from_regex(r"[A-Za-z0-9_:.\-]+", fullmatch=True).filter(lambda text: text != "None")
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@dataclasses.dataclass(frozen=True)
class Sample(Pass):
    """Options of every kind."""

    count: int = 3
    ratio: float | None = 0.5
    flag: bool = False
    text: str | None = None

    name: ClassVar[str] = "sample"
    stage: ClassVar[str] = "joint"

    def run(self, graph: TrainingGraph) -> Report:
        return Report(changed=False)


def make_pass(class_name: str = "Other", module: str = __name__, **attributes: Any) -> type[Pass]:
    """A pass class of its own, with a contract that is right but for `attributes`."""
    contract = {"name": "other", "stage": "joint", "__module__": module, "run": Sample.run}
    contract |= attributes
    return dataclasses.dataclass(frozen=True)(type(class_name, (Pass,), contract))


def refused(text: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse_pipeline(text)
    return str(caught.value)


# Registration


def test_the_passes_that_come_with_the_package_are_known():
    known = passes()
    assert known["bucketing"] is Bucketing
    assert known["gradient_sync"] is GradientSync
    assert known["participation"] is Participation


def test_a_decorated_pass_is_known_and_returned(own_registry):
    assert register_pass(Sample) is Sample
    assert passes()["sample"] is Sample
    assert parse_pipeline("sample") == (Sample(),)


def test_a_class_may_be_registered_again_after_a_reload(own_registry):
    register_pass(Sample)
    reloaded = register_pass(make_pass("Sample", name="sample"))
    assert passes()["sample"] is reloaded


@pytest.mark.parametrize("taken", ["bucketing", "sample"])
def test_a_taken_name_is_an_error(own_registry, taken):
    register_pass(Sample)
    with pytest.raises(ValueError, match=rf"pass name '{taken}' is taken by .*\.(Buck|Samp)"):
        register_pass(make_pass(name=taken))


def test_a_taken_name_is_an_error_for_a_class_of_the_same_name_elsewhere(own_registry):
    with pytest.raises(ValueError, match="'bucketing' is taken"):
        register_pass(make_pass("Bucketing", module="elsewhere", name="bucketing"))


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"name": "Upper"}, "`name` must be a lower-case identifier"),
        ({"name": "two words"}, "`name` must be a lower-case identifier"),
        ({"name": ""}, "`name` must be a lower-case identifier"),
        ({"stage": "forward"}, "`stage` must be one of joint, backward"),
        ({"stage": None}, "`stage` must be one of joint, backward"),
        ({"preserves_numerics": False}, "define `error_bound`"),
        ({"run": Pass.run}, r"define `run\(self, graph\)`"),
        ({"requires": "buckets"}, "`requires` is 'buckets'; expected a set of names"),
        ({"provides": {1}}, r"`provides` is \{1\}; expected a set of names"),
    ],
)
def test_a_malformed_contract_is_an_error(own_registry, attributes, said):
    with pytest.raises(ValueError, match=said):
        register_pass(make_pass(**attributes))


def fields_from(*keys: str) -> type[Pass]:
    """A pass that takes a field from each of these places."""
    fields = {f"field{i}": from_environment(key) for i, key in enumerate(keys)}
    return make_pass(__annotations__=dict.fromkeys(fields, Any), **fields)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("reduces", "'reduces'; did you mean 'reduce'?"),
        ("layouts", "'layouts'; did you mean 'layout'?"),
        (
            "zzz",
            "'zzz'; known: accumulate, bucket_mb, clip_norm, compression, dump, ",
        ),
    ],
)
def test_a_field_from_an_unknown_place_is_an_error(own_registry, key, said):
    with pytest.raises(ValueError) as caught:
        register_pass(fields_from("world", key))
    assert str(caught.value).startswith(f"pass 'other': field 'field1' comes from {said}")
    assert "other" not in passes()


def test_a_field_may_come_from_each_option_and_from_the_process_group(own_registry):
    options = [field.name for field in dataclasses.fields(Hardening)]
    cls = register_pass(fields_from(*FROM_GROUP, *options))
    values = {key: f"value of {key}" for key in (*FROM_GROUP, *options)}
    bound = cls().bind(values)
    assert list(dataclasses.asdict(bound).values()) == list(values.values())
    assert bound.communicates and not fields_from("world")().communicates


def test_a_pass_is_a_frozen_dataclass(own_registry):
    thawed = dataclasses.dataclass(type("Thawed", (object,), {"name": "thawed", "stage": "joint"}))
    with pytest.raises(ValueError, match="pass Thawed: a pass is a frozen dataclass"):
        register_pass(thawed)
    with pytest.raises(ValueError, match="pass Plain: a pass is a frozen dataclass"):
        register_pass(type("Plain", (), {"name": "plain", "stage": "joint"}))


def test_a_numerics_changing_pass_with_a_bound_is_taken(own_registry):
    cls = make_pass(preserves_numerics=False, error_bound=lambda self: "|out - g| <= 1")
    assert register_pass(cls)().error_bound() == "|out - g| <= 1"


# Entry points


@pytest.fixture
def installed(own_registry, monkeypatch, tmp_path):
    """Write a module that holds passes, and install entry points that lead to it."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(code: str, **classes: str) -> None:
        (tmp_path / "third_party.py").write_text(textwrap.dedent(code))
        points = [
            importlib.metadata.EntryPoint(name, f"third_party:{cls}", registry.ENTRY_POINT_GROUP)
            for name, cls in classes.items()
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
        registry._installed.cache_clear()

    yield install
    sys.modules.pop("third_party", None)


THIRD_PARTY = """
    import dataclasses
    from typing import ClassVar
    from fxpasses import Pass, register_pass

    {decorator}
    @dataclasses.dataclass(frozen=True)
    class Mine(Pass):
        name: ClassVar[str] = "mine"
        run = lambda self, graph: None
        stage: ClassVar[str] = "{stage}"

    @dataclasses.dataclass(frozen=True)
    class AlsoMine(Pass):
        name: ClassVar[str] = "mine"
        run = lambda self, graph: None
        stage: ClassVar[str] = "joint"
"""


def test_an_entry_point_makes_a_pass_known(installed):
    installed(THIRD_PARTY.format(decorator="", stage="joint"), mine="Mine")
    (found,) = parse_pipeline("mine")
    assert type(found) is passes()["mine"] is sys.modules["third_party"].Mine


def test_two_entry_points_of_one_name_are_an_error(installed):
    installed(THIRD_PARTY.format(decorator="", stage="joint"), mine="Mine", also="AlsoMine")
    with pytest.raises(ValueError, match="must bear the name of its pass"):
        passes()


def test_an_entry_point_with_a_malformed_contract_is_an_error(installed):
    installed(THIRD_PARTY.format(decorator="", stage="nowhere"), mine="Mine")
    with pytest.raises(ValueError, match="pass 'mine': `stage` must be one of"):
        passes()


def test_the_decorator_refuses_the_name_of_an_installed_pass(installed):
    installed(THIRD_PARTY.format(decorator="", stage="joint"), mine="Mine")
    with pytest.raises(ValueError, match=r"'mine' is taken by third_party\.Mine"):
        register_pass(make_pass(name="mine"))


def test_a_pass_may_have_both_entry_point_and_decorator(installed):
    installed(THIRD_PARTY.format(decorator="@register_pass", stage="joint"), mine="Mine")
    assert passes()["mine"] is sys.modules["third_party"].Mine


# Pipeline strings


def test_the_pipeline_string_of_nothing_is_empty():
    assert parse_pipeline("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "bucketing{mb=2},gradient_sync{reduce=sum,overlap=false}",
        " bucketing { mb = 2 } , gradient_sync{ reduce=sum , overlap = False } ",
        "bucketing{mb=2.0,},gradient_sync{overlap=FALSE,reduce=sum}",
    ],
)
def test_a_pipeline_string_is_read_whatever_its_spacing(text):
    assert parse_pipeline(text) == (
        Bucketing(mb=2.0),
        GradientSync(reduce="sum", overlap=False),
    )


@pytest.mark.parametrize("text", ["bucketing", "bucketing{}", "bucketing{mb=None}"])
def test_options_left_out_stay_at_default(text):
    assert parse_pipeline(text) == (Bucketing(),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("buckting", "option 'passes': unknown pass 'buckting'; did you mean 'bucketing'?"),
        (
            "zzz",
            "option 'passes': unknown pass 'zzz'; known: agree_alarms, bucketing, cast, ",
        ),
        ("bucketing{mbs=1}", "pass 'bucketing' has no option 'mbs'; did you mean 'mb'?"),
        ("bucketing{mb}", "option 'passes': bucketing{mb}: expected option=value"),
        ("bucketing{mb=big}", "option 'passes': bucketing{mb=big}: expected float or NoneType"),
        ("bucketing{mb=0}", "option 'passes': bucketing{mb=0.0}: expected a positive number"),
        ("bucketing{mb=nan}", "option 'passes': bucketing{mb=nan}: expected a positive number"),
        ("gradient_sync{overlap=1}", "option 'passes': gradient_sync{overlap=1}: expected bool"),
        ("gradient_sync{reduce=men}", "gradient_sync{reduce=men}; did you mean 'mean'?"),
        ("gradient_sync{dtype=fp8}", "gradient_sync{dtype=fp8}; known: bf16, fp16, fp32"),
        ("gradient_sync{world=8}", "the process group decides this"),
        ("bucketing{layout=a}", "bucketing{layout=a}: the process group decides this"),
        ("bucketing,,bucketing", "can't read ',bucketing' (character 11 of"),
        ("bucketing bucketing", "can't read 'bucketing' (character 11 of"),
        ("bucketing{mb=1", "can't read '{mb=1' (character 10 of"),
        ("bucketing{mb=1}}", "can't read '}' (character 16 of"),
    ],
)
def test_a_wrong_pipeline_string_names_the_place(text, said):
    assert said in refused(text)


def test_an_option_given_twice_is_an_error():
    assert "mb" in refused("bucketing{mb=1,mb=2}")


def test_an_option_without_default_that_is_left_out_is_named(own_registry):
    register_pass(make_pass(__annotations__={"level": int}))
    assert "level" in refused("other")


def test_optional_is_understood_in_both_spellings(own_registry):
    optional = typing.Optional[int]  # noqa: UP045
    cls = register_pass(make_pass(__annotations__={"level": optional}, level=None))
    assert parse_pipeline("other{level=3}") == (cls(level=3),)


@given(st.none() | positive)
def test_bucketing_makes_the_round_trip(mb):
    made = Bucketing(mb=mb)
    assert parse_pipeline(made.spec) == (made,)


@given(
    st.builds(
        GradientSync,
        reduce=st.sampled_from([None, "mean", "sum"]),
        dtype=st.sampled_from([None, "fp32", "bf16", "fp16"]),
        overlap=st.booleans(),
    )
)
def test_gradient_sync_makes_the_round_trip(made):
    assert parse_pipeline(made.spec) == (made,)


@given(
    st.builds(
        Sample,
        count=st.integers(),
        ratio=st.none() | st.floats(allow_nan=False),
        flag=st.booleans(),
        text=st.none() | names,
    )
)
def test_options_of_all_kinds_make_the_round_trip(made):
    known = registry._decorated
    known["sample"] = Sample
    try:
        assert parse_pipeline(made.spec) == (made,)
    finally:
        del known["sample"]


@given(st.text(alphabet="abmsuc_{}=,. 01", max_size=30))
def test_whatever_the_string_the_error_is_a_value_error_that_names_the_option(text):
    try:
        found = parse_pipeline(text)
    except ValueError as error:
        assert "option 'passes'" in str(error)
    else:
        assert all(isinstance(p, Pass) for p in found)
