"""Signals that wait until a step is over, so that nothing stops half-way through an update."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Handlers of Ctrl-C and SIGTERM, which may raise, run when this is over; once each, in the order in which
    the signals came. Outside of the main thread, where no handler runs, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: dict[int, FrameType | None] = {}

    def note(number: int, frame: FrameType | None) -> None:
        came.setdefault(number, frame)

    own: dict[int, Any] = {}
    try:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):  # what ends the process at once, or is ignored, stays
                own[number] = handler
                signal.signal(number, note)
        yield
    finally:
        for taken, handler in own.items():
            signal.signal(taken, handler)
        for caught, frame in came.items():
            own[caught](caught, frame)
