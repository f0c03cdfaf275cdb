"""Names of any characters, in options that are text in the end."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.compression import Scheme, compression_text, option_of, parse_rules, rules_text
from fxpasses.config import Hardening
from fxpasses.passes.bucketing import Bucketing
from fxpasses.patterns import exactly, partition, quoted, split
from fxpasses.precision import parse_rules as parse_precision
from fxpasses.registry import parse_pipeline

# As keys of a `ParameterDict` may have them.
NAMES = st.text("ab.=;:,{} \t[]!*?'\"é", min_size=1, max_size=8)
ODD = ("x=1", "a:b", "y;z", "a, b", "{k}", "[0]", "*", "a]", "[", "!", "=", "a[=]b")


@given(NAMES, NAMES)
def test_a_name_and_no_other(name, other):
    assert fnmatch.fnmatchcase(name, exactly(name))
    assert fnmatch.fnmatchcase(other, exactly(name)) == (name == other)


@given(NAMES, NAMES)
def test_quoted_patterns_match_what_they_matched(pattern, name):
    assert fnmatch.fnmatchcase(name, quoted(pattern)) == fnmatch.fnmatchcase(name, pattern)


@given(st.lists(NAMES, min_size=1), st.sampled_from("=;:, "))
def test_text_is_split_where_it_was_joined(names, separator):
    patterns = [exactly(name) for name in names]
    text = separator.join(patterns)
    assert split(text, separator) == patterns
    head, found, rest = partition(text, separator)
    assert head == patterns[0] and found + rest == text[len(head) :]
    assert bool(found) == (len(names) > 1)


@given(NAMES, NAMES)
def test_compression_by_name(name, other):
    rules = parse_rules(
        compression_text({"*": "int8", exactly(name): {"scheme": "topk", "ratio": 0.5}})
    )
    assert option_of(name, rules) == Scheme("topk", ratio=0.5)
    assert name == other or option_of(other, rules) == Scheme("int8")
    assert parse_rules(rules_text(rules)) == rules


@pytest.mark.parametrize("name", ODD)
def test_options_by_such_names_reach_passes_and_back(name):
    options = {
        "compression": {"*": "int8", name: "none"},
        "precision_rules": {name: "deny", "aten.exp": "infer"},
    }
    hardening = Hardening.from_options(options)
    assert (name == "*") == (hardening.compression == "")
    assert parse_precision(hardening.precision_rules)[0] == (quoted(name), "deny")
    current = Bucketing(mb=1.0, scheme=hardening.compression)
    assert parse_pipeline(f"{current.spec},gradient_sync")[0].spec == current.spec


def test_unclosed_brackets_are_characters():
    assert split("a[b;c", ";") == ["a[b", "c"] and quoted("a[=") == "a[[][=]"


def test_many_brackets_are_read_in_no_time():
    with pytest.raises(ValueError, match="can't read"):
        parse_pipeline("bucketing{" + "[" * 5000)
