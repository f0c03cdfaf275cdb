"""What the separately compiled parts of one model have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Made by the first part that asks, found by the others.

    Args:
        options: which ask for it, as in messages: "option 'faults'".

    Attributes:
        value: None before anybody asked.
    """

    def __init__(self, options: str) -> None:
        self.value: T | None = None
        self._options = options
        self._asked: Any = None
        self._state: Mapping[str, Any] | None = None

    def use(self, asked: Any, make: Callable[[], T]) -> T:
        """The one that is there, or a new one, which goes on with a state that was loaded before.

        Args:
            asked: what the options say.

        Raises:
            ValueError: when another part said something else.
        """
        if self.value is None:
            self.value, self._asked = make(), asked
            self._load()
        if asked != self._asked:
            raise ValueError(
                f"{self._options}: got {asked!r}, but another part of this model was compiled with "
                f"{self._asked!r}"
            )
        return self.value

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved state; works before anybody asked."""
        self._state = state
        self._load()

    def _load(self) -> None:
        if self.value is not None and self._state is not None:
            self.value.load_state_dict(self._state)  # type: ignore[attr-defined]

    def absorb(self, other: Shared[T]) -> None:
        """Take over what the other has and this one lacks."""
        if self.value is None:
            self.value, self._asked = other.value, other._asked
        self._state = self._state or other._state
