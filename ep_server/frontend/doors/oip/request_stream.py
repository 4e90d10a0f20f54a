"""The requests of one ModelStreamInfer call.

Requests are admitted in order and run together. A failed request ends with an error message, and the others
continue. With the header `triton_grpc_error: true`, the first failure ends the call with its status instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ep_server.errors import EpServerError
from ep_server.frontend.doors.oip.active_inference import ActiveInference
from ep_server.frontend.doors.oip.inference import ResponseForm
from ep_server.frontend.doors.oip.responses import failed, in_stream

Begin = Callable[[Any], Awaitable[ActiveInference]]  # admits a ModelInferRequest; raises EpServerError

_END = None


class RequestStream:
    """Answers of one call. Used by one handler."""

    def __init__(self, begin: Begin, *, ends_on_error: bool) -> None:
        self._begin = begin
        self._ends_on_error = ends_on_error
        self._outbox: asyncio.Queue[Any] = asyncio.Queue(1)  # messages, an error of the call, _END
        self._tasks: set[asyncio.Task[None]] = set()
        self._active: set[ActiveInference] = set()

    async def answers(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Messages in order of arrival until all requests ended. Call close() when the call is over."""
        self._start(self._read(requests))
        while (item := await self._outbox.get()) is not _END:
            if isinstance(item, Exception):
                raise item
            yield item

    def close(self, error: EpServerError | None = None) -> None:
        """Cancels what still runs. error: why the server ends the call. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for active in self._active:  # a task that has not begun would not close its own
            active.close(error)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        """Admits one request after the other: the caller waits while one is being admitted."""
        try:
            async for request in requests:
                await self._admit(request)
        except Exception as error:  # of the call: a message too large, or no message at all
            await self._outbox.put(error)
        own = asyncio.current_task()
        if others := self._tasks - {own}:
            await asyncio.wait(others)
        await self._outbox.put(_END)

    async def _admit(self, request: Any) -> None:
        try:
            active = await self._begin(request)
        except EpServerError as error:
            form = ResponseForm(request.id, request.model_name, ())
            await self._fail(form, error)
        else:
            self._active.add(active)
            self._start(self._answer(active))

    async def _answer(self, active: ActiveInference) -> None:
        try:
            async for response in active.responses():
                await self._outbox.put(in_stream(response, final=active.complete))
        except EpServerError as error:
            await self._fail(active.form, error)
        except Exception as error:  # a bug: the interceptor logs it
            await self._outbox.put(error)
        finally:
            self._active.discard(active)
            active.close()

    async def _fail(self, form: ResponseForm, error: EpServerError) -> None:
        await self._outbox.put(error if self._ends_on_error else failed(form, str(error)))
