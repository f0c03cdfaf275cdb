"""Differences of texts."""

from __future__ import annotations

import difflib
import time

from hypothesis import given
from hypothesis import strategies as st

from fxpasses.dump.diff import unified
from tests.dump.test_folder import patched

LINES = st.lists(st.sampled_from([f"line {i}" for i in range(30)]), max_size=40)


def names() -> tuple[str, str]:
    return "old", "new"


@given(LINES, LINES)
def test_applying_it_to_the_old_text_gives_the_new_one(old, new):
    diff = unified(old, new, names())
    assert (diff == []) == (old == new)
    if diff:
        assert diff[:2] == ["--- old", "+++ new"]
        assert _applied(old, diff) == new


def _applied(old: list[str], diff: list[str]) -> list[str]:
    # A hunk without old lines names the line in front of it.
    fixed = [_from_one(line) if line.startswith("@@") else line for line in diff]
    return patched(old, fixed)


def _from_one(header: str) -> str:
    _, old, new, _ = header.split()
    start, count = old[1:].split(",")
    return f"@@ -{int(start) + (count == '0')},{count} {new} @@"


@given(LINES, LINES)
def test_its_hunks_say_how_long_they_are(old, new):
    for line, body in _hunks(unified(old, new, names())):
        _, before, after, _ = line.split()
        assert int(before.split(",")[1]) == sum(x[0] in " -" for x in body)
        assert int(after.split(",")[1]) == sum(x[0] in " +" for x in body)


def _hunks(diff: list[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in diff[2:]:
        if line.startswith("@@"):
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found


@given(st.lists(st.integers(0, 100), unique=True, max_size=30), st.data())
def test_of_unique_lines_it_is_no_longer_than_difflibs(numbers, data):
    old = [str(n) for n in numbers]
    new = [line for line in old if data.draw(st.booleans())] + ["more"]
    theirs = list(difflib.unified_diff(old, new, lineterm="", n=0))
    ours = unified(old, new, names())
    assert sum(x[0] in "+-" for x in ours[2:]) <= sum(x[0] in "+-" for x in theirs[2:])


def test_line_numbers_count_what_stands_in_front():
    diff = unified(["a"], ["b"], names(), (5, 7))
    assert diff[2] == "@@ -6,1 +8,1 @@"


def test_many_edits_of_a_long_text_take_no_time():
    old = [f"line {i}" for i in range(10_000)]
    new = [x for i, line in enumerate(old) for x in ([line, f"more {i}"] if i % 5 == 0 else [line])]
    started = time.perf_counter()
    diff = unified(old, new, names())
    assert time.perf_counter() - started < 2  # difflib takes minutes
    assert sum(line[0] == "+" for line in diff[2:]) == 2000
