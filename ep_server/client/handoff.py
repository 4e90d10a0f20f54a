"""Prefill on one server, decode on another. See docs/how-to/prefill-decode.md."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ep_server.client.asynchronous import AsyncClient, AsyncStream
from ep_server.errors import EpServerError
from ep_server.v1 import decode_pb2

log = logging.getLogger(__name__)

HANDLE_SECONDS = 5.0  # from the call to its kv_handle, which precedes the prefill


class PrefillDecode:
    """Requests whose prompt is computed at one server and whose output comes from another.

    The decode server fetches the prompt's KV blocks while they are computed. Without the prefill server, or
    if it is slow to answer, the decode server computes the prompt: no request fails for that reason.
    """

    def __init__(
        self, prefill: AsyncClient, decode: AsyncClient, *, handle_seconds: float = HANDLE_SECONDS
    ) -> None:
        """handle_seconds: how long the prefill server may take to admit a request."""
        self._prefill, self._decode, self._handle_seconds = prefill, decode, handle_seconds
        self._prefilling: set[asyncio.Task[None]] = set()

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **fields: Any
    ) -> AsyncStream:
        """As AsyncClient.generate() of the decode server. timeout: of that call."""
        handle = await self._handle(prompt, fields.get("cache_salt"), fields.get("priority"))
        return self._decode.generate(prompt, timeout=timeout, kv_handle=handle, **fields)

    async def close(self) -> None:
        """Ends prefills that still run. Close the clients yourself."""
        for task in self._prefilling:
            task.cancel()
        if self._prefilling:
            await asyncio.wait(self._prefilling)

    async def _handle(
        self, prompt: str | Sequence[int], cache_salt: str | None, priority: int | None
    ) -> decode_pb2.KvHandle | None:
        """Begins the prefill. Returns: None if the server does not admit it in time."""
        stream = self._prefill.generate(
            prompt, max_new_tokens=1, temperature=0.0, hold_kv=True, cache_salt=cache_salt, priority=priority
        )
        given = asyncio.Event()
        task = asyncio.get_running_loop().create_task(_read(stream, given))
        self._prefilling.add(task)
        task.add_done_callback(self._prefilling.discard)
        try:
            async with asyncio.timeout(self._handle_seconds):
                await given.wait()
        except TimeoutError:
            log.warning("no KV handle within %g s: the prompt is computed twice", self._handle_seconds)
        if stream.output.kv_handle is None:
            task.cancel()
        return stream.output.kv_handle


async def _read(stream: AsyncStream, given: asyncio.Event) -> None:
    """Reads a prefill to its end: a dropped call would free its blocks. given: set once its handle is known."""
    try:
        while not stream.done:
            await stream.step()
            if stream.output.kv_handle is not None:
                given.set()
    except EpServerError as error:
        log.warning("the prefill server did not prefill: %s", error)
    finally:
        given.set()
        await stream.close()
