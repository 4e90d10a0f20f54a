"""SIGTERM and SIGINT as calls in the running event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(ask_to_stop: Callable[[], None], *, last: bool = False) -> Iterator[None]:
    """Inside, each of the two signals calls `ask_to_stop`; use it in the main thread.

    Args:
        last: the process ends after this: later signals do nothing, and it ends with its own exit code. Else
            what was there before is back on exit.
    """
    loop = asyncio.get_running_loop()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: there is nothing left to stop
            loop.call_soon_threadsafe(ask_to_stop)

    # Not loop.add_signal_handler: at its end the default handler, which kills, is back for a moment.
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        if not last:
            for number, handler in before.items():
                signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """For the last line of a process where a server left its handlers: Python takes them away too early."""
    for number in SIGNALS:
        if callable(handler := signal.getsignal(number)) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN)
