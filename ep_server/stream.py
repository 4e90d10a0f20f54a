"""[10] The way of one request's tokens to its reader: a bounded queue that merges what waits.

Knows neither gRPC nor ranks. All calls happen in one event loop; only `read` waits.

Cancellation guarantee: `read` is atomic with respect to cancellation; a cancelled `read` has taken nothing.
Once `close` was called, or the stream ended, nothing is queued any more and `on_close` has run exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field

from ep_server.errors import EpServerError, InternalError, SlowReader
from ep_server.records import FinishReason, TokenEvent


@dataclass(frozen=True, slots=True)
class Completion:
    """How an output ended. match: the token id or the stop string that ended it, None for LENGTH."""

    reason: FinishReason
    match: int | str | None
    cached_tokens: int
    output_tokens: int
    first_token_seconds: float
    total_seconds: float
    max_gap_seconds: float
    queued_seconds: float


@dataclass(slots=True)
class Chunk:
    """What waits for the reader: tokens in order, the text that is certain, and how it ended if it did."""

    events: list[TokenEvent] = field(default_factory=list)
    text: str = ""
    completion: Completion | None = None


class TokenStream:
    """Tokens of one request. Writer: the engine. Reader: one coroutine.

    capacity: tokens that may wait for the reader; beyond it the writer gets SlowReader.
    interval: tokens that `read` waits for, the first and the last excepted.
    on_close: called once when the reader leaves or has seen the end.
    """

    def __init__(self, capacity: int, interval: int, on_close: Callable[[], None]) -> None:
        self._capacity = capacity
        self._interval = interval
        self._on_close = on_close
        self._chunk = Chunk()
        self._needed = 1  # the first token goes out alone: it is what time-to-first-token means
        self._error: EpServerError | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self.ended else "open"
        return f"<TokenStream {state}, {len(self._chunk.events)}/{self._capacity} tokens>"

    @property
    def ended(self) -> bool:
        """The writer is done: nothing more is queued."""
        return self._closed or self._error is not None or self._chunk.completion is not None

    def put(self, event: TokenEvent, text: str) -> None:
        """Queues a token and the text that became certain with it.

        Raises: SlowReader when more than `capacity` tokens wait; the caller ends the request with it.
        """
        if self.ended:
            raise InternalError(f"token of request {event.number} after the end of its stream")
        if len(self._chunk.events) >= self._capacity:
            raise SlowReader(f"{self._capacity} tokens wait for their reader (grpc.stream_buffer)")
        self._chunk.events.append(event)
        self._chunk.text += text
        self._wake()

    def finish(self, completion: Completion) -> None:
        """Ends the stream well; tokens that wait are still read."""
        if not self.ended:
            self._chunk.completion = completion
            self._wake()

    def fail(self, error: EpServerError) -> None:
        """Ends the stream with an error; tokens that wait are still read before `read` raises it."""
        if not self.ended:
            self._error = error
            self._wake()

    def close(self) -> None:
        """The reader is gone, or has read the end. Idempotent."""
        if not self._closed:
            self._closed = True
            self._chunk = Chunk()
            self._on_close()

    async def read(self) -> Chunk:
        """Waits for `interval` tokens or the end, then takes everything. The last chunk has a completion.

        Raises: the error that the stream was ended with.
        """
        await _any_ready([self])
        return self._take()

    def _take(self) -> Chunk:
        if self._error is not None and not self._chunk.events:
            raise self._error
        chunk, self._chunk = self._chunk, Chunk()
        self._needed = self._interval
        return chunk

    def _ready(self) -> bool:
        if self._closed:
            raise InternalError("read from a closed stream")
        return len(self._chunk.events) >= self._needed or self.ended

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._ready():
            self._waiter.set_result(None)


async def merged(streams: Sequence[TokenStream]) -> AsyncIterator[tuple[int, Chunk]]:
    """(index, chunk) as they come, until every stream has given its completion; no stream starves another.

    Raises: the error that one of them was ended with.
    """
    left = dict(enumerate(streams))
    while left:
        await _any_ready(left.values())
        for index, stream in list(left.items()):
            if stream._ready():
                chunk = stream._take()
                if chunk.completion is not None:
                    del left[index]
                yield index, chunk


async def _any_ready(streams: Collection[TokenStream]) -> None:
    while not any(stream._ready() for stream in streams):
        waiter = asyncio.get_running_loop().create_future()
        for stream in streams:
            stream._waiter = waiter
        try:
            await waiter
        finally:
            for stream in streams:
                stream._waiter = None
