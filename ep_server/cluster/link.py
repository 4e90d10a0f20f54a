"""The link between two nodes: ordered messages both ways over one gRPC stream, and heartbeats.

gRPC's own threads send and answer pings (`liveness`), however busy the event loop is. They break the
connection to a process that is stopped or cut off. In addition each side sends a bundle, possibly empty,
several times within `silent_seconds`. Units: seconds, bytes.
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

MAX_BUFFERED = 256 << 20  # may be queued for the other node
BUNDLE_BYTES = 1 << 20  # a bundle this large takes no further message
TICKS = 5  # per silence: a heartbeat and a ping at each
STUCK = 12  # silences after which a loop counts as stuck, although its process answers pings


def liveness(silent_seconds: float) -> list[tuple[str, int]]:
    """gRPC options for either end: the connection breaks after `silent_seconds` without an answer."""
    ping_ms, answer_ms = int(silent_seconds / TICKS * 1000), int(silent_seconds * (TICKS - 1) / TICKS * 1000)
    return [
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # a minute by default, whatever keepalive_timeout_ms says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),  # allow any number of pings
    ]


class Link:
    """One end. The stream sends `outgoing()` and passes what it receives to `read()`; each runs once."""

    def __init__(self, on_message: Callable[[pb.NodeMessage], None], silent_seconds: float) -> None:
        self.buffered = 0
        self._on_message = on_message
        self._silent_seconds = silent_seconds
        self._outbox: deque[tuple[pb.NodeMessage, int]] = deque()
        self._wake = asyncio.Event()
        self._received = False
        self._silent = 0  # ticks
        self._sign = asyncio.Event()
        self._last = False
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Link(buffered={self.buffered}, ended={self.reason!r})"

    @property
    def reason(self) -> str:
        """Why the link has ended; "" while it is open."""
        return self._reason.result() if self._reason.done() else ""

    def send(self, **kind: Message) -> None:
        """Sends a NodeMessage with the given fields; does not block. Does nothing once the link has ended."""
        if self._last or self._reason.done():
            return
        message = pb.NodeMessage(**kind)  # type: ignore[arg-type]
        size = message.ByteSize()
        self._outbox.append((message, size))
        self.buffered += size
        self._wake.set()
        if self.buffered > MAX_BUFFERED:
            self.end(f"left {self.buffered} bytes unread")

    def finish(self) -> None:
        """Closes this side once everything queued is sent."""
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
        """Calls `callback` soon after the end, even while the stream cannot send."""
        self._reason.add_done_callback(lambda _: callback())

    async def ended(self) -> str:
        """Waits for the end. Returns: why."""
        return await asyncio.shield(self._reason)

    async def sign(self) -> None:
        """Waits for the next heartbeat, or for the end if none arrives in time."""
        if not self._reason.done():
            self._sign.clear()
            self._wake.set()  # sends a bundle: a host that has forgotten this connection then breaks it
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
        """Handles incoming messages until the other side closes or the link ends.

        Raises nothing: any error ends the link.
        """
        self._watching = asyncio.create_task(self._watch())
        try:
            async for bundle in bundles:
                if self._reason.done():  # the stream outlives the end while it cannot send
                    return
                self._received = True
                self._sign.set()
                for message in bundle.messages:
                    self._on_message(message)
            self._close()
        except aio.AioRpcError as error:
            self._close(f": {error.code().name}: {error.details()}")
        except EpServerError as error:
            self.end(f"sent an invalid message: {error}")
        except asyncio.CancelledError:
            self._close()
            raise
        except Exception as error:
            log.exception("a message of another node could not be handled")
            self.end(f"sent an invalid message: {error!r}")

    def _close(self, why: str = "") -> None:
        """The stream ended; after a silence, the silence is the reason."""
        silent = self._silent >= TICKS - 2  # a ping waits at least that long
        self.end(f"was silent for {self._silent_seconds:g} s" if silent else f"closed the link{why}")

    def _take(self) -> pb.Bundle:
        bundle, size = pb.Bundle(), 0
        while self._outbox and size < BUNDLE_BYTES:
            message, length = self._outbox.popleft()
            bundle.messages.append(message)
            size += length
        self.buffered -= size
        return bundle

    async def _watch(self) -> None:
        """Counts ticks, not time: a process that was itself stopped must not blame its peer."""
        while self._silent < STUCK * TICKS:
            await asyncio.sleep(self._silent_seconds / TICKS)
            self._silent = 0 if self._received else self._silent + 1
            self._received = False
            self._wake.set()
        self.end(f"was silent for {STUCK * self._silent_seconds:g} s")
