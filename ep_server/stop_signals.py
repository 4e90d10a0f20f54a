"""SIGTERM and SIGINT as calls in the running event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(ask_to_stop: Callable[[], None]) -> Iterator[None]:
    """Inside, each of the two signals calls `ask_to_stop`; use it in the main thread."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, ask_to_stop)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
