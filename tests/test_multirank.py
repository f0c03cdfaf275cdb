"""Where ranks come from."""

from __future__ import annotations

import os
import sys

from tests.multirank import run_ranks


def server(rank: int) -> tuple[bool, int]:
    return "tests.warm" in sys.modules, len(os.listdir(f"/proc/{os.getppid()}/task"))


def test_ranks_are_forked_from_a_process_that_has_compiled_and_has_one_thread():
    assert run_ranks(server, 1) == [(True, 1)]
