"""What runs behind ranks that serve has a low priority; the thread that waits for it keeps its own."""

from __future__ import annotations

import os
import threading

import pytest

from ep_server.errors import CheckpointError
from ep_server.ranks.background import NICE, run_behind


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_behind_and_its_threads_yield_the_cores() -> None:
    before, found = niceness(), []

    def work() -> str:
        own = threading.Thread(target=lambda: found.append(niceness()))
        own.start()
        own.join()
        found.append(niceness())
        return "done"

    assert run_behind(work) == "done"
    assert found == [NICE, NICE] and niceness() == before


def test_an_error_behind_is_raised() -> None:
    def fail() -> None:
        raise CheckpointError("broken")

    with pytest.raises(CheckpointError, match="broken"):
        run_behind(fail)
