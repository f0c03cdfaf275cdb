"""How much of what happened is remembered."""

from __future__ import annotations

from typing import Any

REMEMBERED = 10_000  # events


def forget(events: list[Any]) -> int:
    """Drop the oldest events that are too many; returns how many."""
    surplus = max(len(events) - REMEMBERED, 0)
    del events[:surplus]
    return surplus
