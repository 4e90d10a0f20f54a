"""The link between two nodes: messages in order both ways over one gRPC stream, and a sign of life.

Each side sends something, if only an empty bundle, several times within the silence that the other one
bears. Knows neither ranks nor servers. Units: seconds, bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable

from google.protobuf.message import Message
from grpc import aio

from ep_server.errors import EpServerError
from ep_server.v1 import nodes_pb2 as pb

log = logging.getLogger(__name__)

MAX_BUFFERED = 256 << 20  # that may wait for the other node
BUNDLE_BYTES = 1 << 20  # from which on a bundle takes no further message
TICKS = 5  # of one silence: a sign of life at each


class Link:
    """One end. `outgoing()` is what the stream sends, `read()` takes what it receives; each runs once."""

    def __init__(self, on_message: Callable[[pb.NodeMessage], None], silent_seconds: float) -> None:
        self.buffered = 0
        self._on_message = on_message
        self._silent_seconds = silent_seconds
        self._outbox: deque[tuple[pb.NodeMessage, int]] = deque()
        self._wake = asyncio.Event()
        self._heard = False
        self._sign = asyncio.Event()
        self._last = False
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Link(buffered={self.buffered}, ended={self.reason!r})"

    @property
    def reason(self) -> str:
        """Why the link has ended, "" while it has not."""
        return self._reason.result() if self._reason.done() else ""

    def send(self, **kind: Message) -> None:
        """Sends a message, NodeMessage's fields; does not block. Nothing happens once the link has ended."""
        if self._last or self._reason.done():
            return
        message = pb.NodeMessage(**kind)  # type: ignore[arg-type]
        size = message.ByteSize()
        self._outbox.append((message, size))
        self.buffered += size
        self._wake.set()
        if self.buffered > MAX_BUFFERED:
            self.end(f"has left {self.buffered} bytes unread")

    def finish(self) -> None:
        """Closes this side once everything sent has left."""
        self._last = True
        self._wake.set()

    def end(self, reason: str) -> None:
        """Ends the link at once. Idempotent: the first reason counts."""
        if not self._reason.done():
            self._reason.set_result(reason)
        if self._watching is not None:
            self._watching.cancel()
        self._wake.set()
        self._sign.set()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Has `callback` called soon after the end, also while the stream cannot send what it has."""
        self._reason.add_done_callback(lambda _: callback())

    async def ended(self) -> str:
        """Waits for the end. Returns: why."""
        return await asyncio.shield(self._reason)

    async def sign(self) -> None:
        """Waits for a sign of life or for the end, which comes to whoever gives none within the silence."""
        if not self._reason.done():
            self._sign.clear()
            self._wake.set()  # something is sent: a host that has forgotten this connection breaks it then
            await self._sign.wait()

    async def outgoing(self) -> AsyncIterator[pb.Bundle]:
        """Bundles to be sent, until finish() or the end."""
        while not self._reason.done():
            self._wake.clear()
            yield self._take()
            if not self._outbox:
                if self._last:
                    return
                await self._wake.wait()

    async def read(self, bundles: AsyncIterable[pb.Bundle]) -> None:
        """Takes all that comes until the other side closes or the link ends.

        Raises nothing: what goes wrong ends the link.
        """
        self._watching = asyncio.create_task(self._watch())
        try:
            async for bundle in bundles:
                if self._reason.done():  # the stream outlives the end while it cannot send
                    return
                self._heard = True
                self._sign.set()
                for message in bundle.messages:
                    self._on_message(message)
            self.end("closed the link")
        except aio.AioRpcError as error:
            self.end(f"closed the link: {error.code().name}: {error.details()}")
        except EpServerError as error:
            self.end(f"sent what was not understood: {error}")
        except asyncio.CancelledError:
            self.end("closed the link")
            raise
        except Exception as error:
            log.exception("a message of another node")
            self.end(f"sent what was not understood: {error!r}")

    def _take(self) -> pb.Bundle:
        bundle, size = pb.Bundle(), 0
        while self._outbox and size < BUNDLE_BYTES:
            message, length = self._outbox.popleft()
            bundle.messages.append(message)
            size += length
        self.buffered -= size
        return bundle

    async def _watch(self) -> None:
        """Counts ticks of this process, not time: whoever was stopped itself does not blame the other."""
        silent = 0
        while silent < TICKS:
            await asyncio.sleep(self._silent_seconds / TICKS)
            silent = 0 if self._heard else silent + 1
            self._heard = False
            self._wake.set()
        self.end(f"said nothing for {self._silent_seconds:g} s")
