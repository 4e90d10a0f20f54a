"""[1] Ends calls whose callers stop reading.

HTTP/2 flow control blocks the server while a caller does not read. A blocked call could hold buffered
output and its place among grpc.max_streams forever, so the wait of each message is limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
from grpc import aio

from ep_server.errors import EpServerError, SlowReader


class CallEnd:
    """Ends one call from outside its handler, even while a write of the handler is blocked.

    Create it in the handler: it remembers the task that runs it.
    """

    def __init__(self, context: Any) -> None:
        self.error: EpServerError | None = None  # with which the call was ended
        self._context = context
        self._handler = asyncio.current_task()
        self._ending: asyncio.Task[None] | None = None

    def __call__(self, error: EpServerError) -> None:
        """Sends the status behind the message that blocks and ends the handler. Later calls do nothing."""
        if self.error is None:
            self.error = error
            self._ending = asyncio.ensure_future(self._end(error))

    async def _end(self, error: EpServerError) -> None:
        if self._handler is None or self._handler.done():  # gRPC has released the call
            return
        trailers = (("epserver-error", type(error).__name__),)
        # gRPC has the status once abort() waits. The wait itself would last until the caller reads.
        with suppress(TimeoutError, aio.BaseError):
            async with asyncio.timeout(0):
                await self._context.abort(grpc.StatusCode[error.status], str(error), trailers)
        self._handler.cancel()


async def read_in_time(
    messages: AsyncIterator[Any], seconds: float, end: Callable[[EpServerError], None]
) -> AsyncIterator[Any]:
    """Passes messages on; calls `end` with SlowReader when one of them blocks for `seconds`."""
    loop = asyncio.get_running_loop()
    blocked_at: float | None = None
    timer: asyncio.TimerHandle | None = None

    def check() -> None:
        """One timer per call, not per message: it checks the message that waits now."""
        nonlocal timer
        timer = None
        if blocked_at is None:
            return
        if loop.time() >= blocked_at + seconds:
            end(SlowReader(f"the caller read nothing for grpc.unread_seconds = {seconds:g}"))
        else:
            timer = loop.call_at(blocked_at + seconds, check)

    try:
        async for message in messages:
            blocked_at = loop.time()
            if timer is None:
                timer = loop.call_at(blocked_at + seconds, check)
            yield message
            blocked_at = None
    finally:
        if timer is not None:
            timer.cancel()
