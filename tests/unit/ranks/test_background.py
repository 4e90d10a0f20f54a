"""What runs behind ranks that serve has a low priority; the thread that waits for it keeps its own."""

from __future__ import annotations

import os
import threading

import pytest

from ep_server.errors import CheckpointError
from ep_server.ranks.background import BEHIND, BESIDE, run_behind, yield_cores


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
    assert found == [BEHIND, BEHIND] and niceness() == before


def test_a_thread_beside_steps_yields_less() -> None:
    """A step may have to wait for it: both need the interpreter's lock. No thread gets a higher priority."""
    found = list[int]()

    def run() -> None:
        yield_cores()
        found.append(niceness())
        yield_cores(BEHIND)
        yield_cores()
        found.append(niceness())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [max(BESIDE, niceness()), BEHIND]


def test_an_error_behind_is_raised() -> None:
    def fail() -> None:
        raise CheckpointError("broken")

    with pytest.raises(CheckpointError, match="broken"):
        run_behind(fail)
