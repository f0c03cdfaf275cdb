"""Options: what is refused and how, and profiles."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.config import Hardening, nearest

OPTIONS = [field.name for field in dataclasses.fields(Hardening)]


def refused(options: dict) -> str:
    with pytest.raises(ValueError) as caught:
        Hardening.from_options(options)
    return str(caught.value)


@pytest.mark.parametrize("options", [None, {}])
def test_no_options_are_the_defaults(options):
    assert Hardening.from_options(options) == Hardening()
    assert Hardening() == Hardening(
        process_group=None,
        reduce="mean",
        reduce_dtype=None,
        bucket_mb=25.0,
        accumulate=1,
        passes=None,
        dump=None,
        profile=None,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelt_key_names_the_nearest(name):
    assert refused({name + "s": 1}) == f"unknown option '{name}s'; did you mean '{name}'?"


def test_a_key_like_none_lists_all():
    message = refused({"zzz": 1})
    assert message.startswith("unknown option 'zzz'; known: ")
    assert all(name in message for name in OPTIONS)


def test_a_key_that_is_no_string_is_refused():
    assert refused({3: 4}).startswith("unknown option 3; known: ")


@pytest.mark.parametrize(
    ("option", "value", "nearest_one"),
    [
        ("reduce", "men", "; did you mean 'mean'?"),
        ("reduce", "SUM", "; known: mean, sum"),
        ("reduce", None, "; known: mean, sum"),
        ("reduce", ["mean"], "; did you mean 'mean'?"),
        ("reduce_dtype", "fp23", "; did you mean 'fp32'?"),
        ("reduce_dtype", "float32", "; known: bf16, fp16, fp32"),
        ("reduce_dtype", "int", "; known: bf16, fp16, fp32"),
        ("bucket_mb", 0, "; expected a positive number"),
        ("bucket_mb", -1.5, "; expected a positive number"),
        ("bucket_mb", float("inf"), "; expected a positive number"),
        ("bucket_mb", float("nan"), "; expected a positive number"),
        ("bucket_mb", True, "; expected a positive number"),
        ("bucket_mb", "25", "; expected a positive number"),
        ("bucket_mb", None, "; expected a positive number"),
        ("accumulate", 0, "; expected a whole number, 1 or more"),
        ("accumulate", -2, "; expected a whole number, 1 or more"),
        ("accumulate", 2.0, "; expected a whole number, 1 or more"),
        ("accumulate", True, "; expected a whole number, 1 or more"),
        ("accumulate", "2", "; expected a whole number, 1 or more"),
        ("accumulate", None, "; expected a whole number, 1 or more"),
        ("process_group", 3, "; expected a torch.distributed.ProcessGroup or its name"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_work(option, value, nearest_one):
    assert refused({option: value}) == f"option {option!r}: got {value!r}{nearest_one}"


@pytest.mark.parametrize(
    ("option", "expected"), [("passes", "string"), ("dump", "path"), ("profile", "path")]
)
def test_texts_must_be_strings(option, expected):
    assert refused({option: 7}) == f"option {option!r}: expected a {expected}, got 7"


@pytest.mark.parametrize("field", OPTIONS)
def test_the_dataclass_checks_as_the_mapping_does(field):
    with pytest.raises(ValueError, match=re.escape(repr(field))):
        Hardening(**{field: object()})


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hardening().reduce = "sum"


def test_equal_options_are_one_cache_key():
    assert len({Hardening(bucket_mb=1), Hardening(bucket_mb=1.0), Hardening(bucket_mb=2)}) == 2


def test_a_process_group_is_taken_by_object_and_by_name(fake_world):
    for value in (dist.group.WORLD, fake_world):
        assert Hardening.from_options({"process_group": value}).process_group is value


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.integers(1, 10**9))
def test_any_positive_number_is_a_bucket_size(mb):
    assert Hardening.from_options({"bucket_mb": mb}).bucket_mb == mb


@given(st.integers(min_value=1))
def test_any_count_of_micro_batches_is_taken(count):
    assert Hardening.from_options({"accumulate": count}).accumulate == count


def test_an_integer_beyond_all_floats_is_a_positive_number():
    assert Hardening(bucket_mb=10**400).bucket_mb == 10**400


@pytest.mark.parametrize("option", ["dump", "profile"])
def test_a_path_object_is_a_path(option, tmp_path):
    path = tmp_path / "place"
    path.write_text("")
    assert Hardening.from_options({option: path})


def test_the_mapping_is_left_alone(tmp_path):
    options = {"profile": profile(tmp_path, "bucket_mb = 3"), "reduce": "sum"}
    before = dict(options)
    Hardening.from_options(options)
    assert options == before


# Profiles


def profile(folder: Path, text: str | bytes) -> str:
    path = folder / "profile.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_a_profile_fills_what_was_not_given(tmp_path):
    path = profile(tmp_path, 'bucket_mb = 3\nreduce = "sum"\nreduce_dtype = "bf16"')
    found = Hardening.from_options({"profile": path, "reduce": "mean", "reduce_dtype": None})
    assert found == Hardening(profile=path, bucket_mb=3, reduce="mean", reduce_dtype=None)


def test_an_empty_profile_changes_nothing(tmp_path):
    path = profile(tmp_path, "")
    assert Hardening.from_options({"profile": path}) == Hardening(profile=path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bucket_mbs = 3", "bucket_mbs'; did you mean 'bucket_mb'?"),
        ("bucket_mb = -3", "option 'bucket_mb': got -3; expected a positive number"),
        ("accumulate = 1.5", "option 'accumulate': got 1.5; expected a whole number, 1 or more"),
        ('reduce = "men"', "option 'reduce': got 'men'; did you mean 'mean'?"),
        ("bucket_mb = ", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        ('profile = "other.toml"', "names another profile"),
        ("[passes]\nbucketing = 1", "option 'passes': expected a string, got {'bucketing': 1}"),
    ],
)
def test_a_wrong_profile_says_what_is_wrong(tmp_path, text, said):
    assert said in refused({"profile": profile(tmp_path, text)})


@pytest.mark.parametrize("text", ["bucket_mbs = 3", "bucket_mb = ", 'profile = "x"'])
def test_a_malformed_profile_is_named(tmp_path, text):
    path = profile(tmp_path, text)
    assert repr(path) in refused({"profile": path})


def test_a_wrong_value_that_an_option_overrides_does_no_harm(tmp_path):
    path = profile(tmp_path, "bucket_mb = -3")
    assert Hardening.from_options({"profile": path, "bucket_mb": 4}).bucket_mb == 4


def test_an_unreadable_profile_is_named(tmp_path):
    missing = str(tmp_path / "missing.toml")
    said = f"option 'profile': can't read {missing!r}: No such file or directory"
    assert refused({"profile": missing}) == said
    assert refused({"profile": str(tmp_path)}).endswith(": Is a directory")


@pytest.mark.parametrize("path", [7, ["a.toml"]])
def test_a_profile_is_a_path(path):
    assert refused({"profile": path}) == f"option 'profile': expected a path, got {path!r}"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "reduce": st.sampled_from(["mean", "sum"]),
            "reduce_dtype": st.sampled_from(["fp32", "bf16", "fp16"]),
            "bucket_mb": st.floats(1e-6, 1e6),
            "accumulate": st.integers(1, 2**31),
            "passes": st.sampled_from(["", "bucketing{mb=1},gradient_sync"]),
        },
    )
)
def test_a_profile_says_what_options_say(tmp_path_factory, options):
    lines = (f"{key} = {value!r}" for key, value in options.items())
    path = profile(tmp_path_factory.mktemp("profile"), "\n".join(lines))
    given_in_file = Hardening.from_options({"profile": path})
    assert given_in_file == dataclasses.replace(Hardening(**options), profile=path)


# nearest


@pytest.mark.parametrize(
    ("word", "said"), [("men", "; did you mean 'mean'?"), ("x", "; known: mean, sum"), ("", None)]
)
def test_nearest(word, said):
    assert nearest(word, {"sum", "mean"}) == (said or "; known: mean, sum")
