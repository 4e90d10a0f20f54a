"""Prefill on one server, decode on another. See docs/how-to/prefill-decode.md."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import grpc

from ep_server.client.asynchronous import AsyncClient, AsyncStream
from ep_server.client.failures import NO_RETRIES
from ep_server.client.target import Target
from ep_server.errors import EpServerError, Unavailable
from ep_server.v1 import decode_pb2

log = logging.getLogger(__name__)

HANDLE_SECONDS = 5.0  # for a prefill server to admit a request
RELEASE_SECONDS = 10.0
ASK_SECONDS, AGAIN_SECONDS = 1.0, 0.2  # for its answer to a health check; between two of them
CLOSE_SECONDS = 1.0  # of close(), for releases that are under way
COMMON = ("cache_salt", "bypass_prefix_cache", "priority", "deadline_ms")  # fields that a prefill has too


class PrefillDecode(AbstractAsyncContextManager["PrefillDecode"]):
    """Requests whose prompt is computed at one server and whose output comes from another.

    The decode server fetches the prompt's KV blocks while they are computed. Without the prefill server, or
    if it does not answer, the decode server computes the prompt: no request fails for that reason. Once a
    prefill server could not be reached, or has not answered, no request tries it until it answers health
    checks.

    Close it, or use it in `async with`. Closing it ends prefills that still run.
    """

    def __init__(
        self, prefill: Target | str, decode: AsyncClient, *, handle_seconds: float = HANDLE_SECONDS
    ) -> None:
        """decode: closed by the caller. handle_seconds: for the prefill server to admit a request."""
        self._prefill, self._decode = AsyncClient(prefill, retries=NO_RETRIES), decode
        self._handle_seconds = handle_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None  # while the prefill server does not answer

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends prefills that still run, and the connection to their server."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=CLOSE_SECONDS)
        for task in (*self._tasks, *([] if self._asking is None else [self._asking])):
            task.cancel()
        await self._prefill.close()

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **fields: Any
    ) -> AsyncStream:
        """As AsyncClient.generate() of the decode server. timeout: of that call, in seconds."""
        common = {name: value for name, value in fields.items() if name in COMMON}
        handle = await self._handle(prompt, common)
        try:
            stream = self._decode.generate(prompt, timeout=timeout, kv_handle=handle, **fields)
        except Exception:  # arguments that no request can have
            if handle is not None:
                self._begin_release(self._release(handle.key))
            raise
        if handle is not None:
            stream.unanswered = lambda: self._dropped(handle.key)
        return stream

    async def _handle(self, prompt: str | Sequence[int], fields: Any) -> decode_pb2.KvHandle | None:
        """Begins a prefill. Returns: None if the server does not admit it in time, or did not."""
        if self._asking is not None and not self._asking.done():
            return None
        stream = self._prefill.generate(prompt, max_new_tokens=1, temperature=0.0, hold_kv=True, **fields)
        asked = asyncio.create_task(stream.kv_handle())
        try:
            async with asyncio.timeout(self._handle_seconds):
                handle = await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._begin_release(self._discard(stream, asked))
            raise
        except (EpServerError, StopAsyncIteration, TimeoutError) as error:
            why = f"no answer in {self._handle_seconds:g} s" if isinstance(error, TimeoutError) else error
            log.warning("%s: %s: the decode server computes the prompt", self._prefill.target.address, why)
            asked.cancel()
            await stream.close()
            gone = isinstance(error, (TimeoutError, Unavailable))
            if gone and (self._asking is None or self._asking.done()):
                self._asking = asyncio.get_running_loop().create_task(self._ask())
            return None
        self._begin(self._finish(stream))
        return handle

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin_release(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._begin(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _dropped(self, key: bytes) -> None:
        """The decode server has not answered. Perhaps no loop runs any more; the blocks expire then."""
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            self._begin_release(self._release(key))

    async def _discard(self, stream: AsyncStream, asked: asyncio.Task[decode_pb2.KvHandle]) -> None:
        """The caller left before it had a handle. The prefill may have ended all the same."""
        try:
            async with asyncio.timeout(self._handle_seconds):
                key = (await asked).key
        except (EpServerError, StopAsyncIteration, TimeoutError):
            return
        finally:
            await stream.close()
        await self._release(key)

    async def _release(self, key: bytes) -> None:
        """Perhaps nobody fetches these blocks: the decode server has not answered the request."""
        request, metadata = decode_pb2.ReleaseKvRequest(key=key), self._prefill.target.metadata
        with suppress(grpc.RpcError):  # then they expire
            await self._prefill.decode.ReleaseKv(request, timeout=RELEASE_SECONDS, metadata=metadata)

    async def _finish(self, stream: AsyncStream) -> None:
        """Reads a prefill to its end: a call that is dropped frees its blocks."""
        try:
            await stream.read()
        except EpServerError as error:
            address = self._prefill.target.address
            log.warning("%s: %s: the decode server computes what it has not fetched", address, error)

    async def _ask(self) -> None:
        """Until the prefill server answers."""
        log.warning("%s does not answer: no request tries it", self._prefill.target.address)
        while True:
            with suppress(EpServerError):
                if await self._prefill.serving(timeout=ASK_SECONDS):
                    break
            await asyncio.sleep(AGAIN_SECONDS)
        log.info("%s answers again", self._prefill.target.address)
