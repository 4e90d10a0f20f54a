"""Work that leaves the cores to ranks that serve on them: what is loaded, copied or imported meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

BEHIND = 19  # of a process that serves nobody yet
# Of a thread beside steps of its process. It holds the interpreter's lock at times, and a step that needs it
# waits until the thread runs again: on busy cores for 1 to 2 s with a niceness of 19, for 0.15 s with 5.
BESIDE = 5

T = TypeVar("T")


def yield_cores(niceness: int = BESIDE) -> None:
    """Lowers the priority of the calling thread and of those that it starts.

    Those of numpy's BLAS, which no step uses, start with its import and keep it.
    """
    thread = threading.get_native_id()
    lowest = max(niceness, os.getpriority(os.PRIO_PROCESS, thread))  # a server may be nicer itself
    os.setpriority(os.PRIO_PROCESS, thread, lowest)


def run_behind(work: Callable[[], T]) -> T:
    """In a thread of its own, since a thread may not raise its priority again. Raises: what `work` raises."""
    with ThreadPoolExecutor(1, "behind", initializer=yield_cores, initargs=(BEHIND,)) as thread:
        return thread.submit(work).result()
