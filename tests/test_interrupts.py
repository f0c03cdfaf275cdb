"""Signals wait for the end of what must not be interrupted."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fxpasses.interrupts import uninterrupted


def test_ctrl_c_comes_when_it_is_over(interruptible):
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all")
    assert done == ["all"]


def test_handlers_are_put_back_and_called_once_with_their_signal():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append((number, frame)))
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
        assert [number for number, _ in seen] == [signal.SIGTERM] and seen[0][1] is not None
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_inside_is_not_lost():
    with pytest.raises(ValueError, match="inside"), uninterrupted():
        raise ValueError("inside")


def test_signals_that_end_the_process_or_are_ignored_stay():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_has_no_handlers_to_hold_back():
    found = []

    def work() -> None:
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert found == [before]
