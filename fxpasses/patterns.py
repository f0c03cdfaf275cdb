"""Patterns of names in text that is split at some characters: options, pipeline strings.

What stands in brackets is not split. So `[=]`, which as a pattern matches `=` alone, stands for it.
"""

from __future__ import annotations

import glob
import re

_SET = r"\[!?\]?[^\]]*\]"  # of characters, as in a shell's patterns
_PARTS = re.compile(rf"{_SET}|.", re.DOTALL)
# Where text is split; and a bracket that is not closed, which another one could close.
_QUOTED = (*"=;:,{}", *" \t\n", "[")
# What may stand between braces.
OPTIONS = rf"(?>{_SET}|[^{{}}])*+"


def quoted(pattern: str) -> str:
    """The same pattern, as it can stand in such text."""
    return "".join(f"[{part}]" if part in _QUOTED else part for part in _PARTS.findall(pattern))


def exactly(name: str) -> str:
    """The pattern that this name alone matches, as it can stand in such text."""
    return quoted(glob.escape(name))


def split(text: str, separator: str) -> list[str]:
    """As `str.split`, outside of brackets."""
    found = [""]
    for part in _PARTS.findall(text):
        if part == separator:
            found.append("")
        else:
            found[-1] += part
    return found


def partition(text: str, separator: str) -> tuple[str, str, str]:
    """As `str.partition`, outside of brackets."""
    first, *rest = split(text, separator)
    return first, separator if rest else "", separator.join(rest)
