"""Work that leaves the cores to ranks that serve on them: what is loaded, copied or imported meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NICE = 19

T = TypeVar("T")


def yield_cores() -> None:
    """Lowers the priority of the calling thread and of those that it starts.

    Those of numpy's BLAS, which no step uses, start with its import and keep it.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def run_behind(work: Callable[[], T]) -> T:
    """In a thread of its own, since a thread may not raise its priority again. Raises: what `work` raises."""
    with ThreadPoolExecutor(1, "behind", initializer=yield_cores) as thread:
        return thread.submit(work).result()
