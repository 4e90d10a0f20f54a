"""[10] Token stream of one request: a bounded queue that merges waiting tokens into one message.

All calls happen in one event loop; only `read` waits.

Cancellation guarantee: `read` is atomic; a cancelled `read` has taken nothing. After `close`, or after the
stream ended, nothing is queued and `on_close` has run exactly once.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from ep_server.errors import EpServerError, InternalError, SlowReader
from ep_server.records import FinishReason, PromptLogprobs, TokenEvent

# Most tokens of one message, unless its interval is longer: gRPC buffers an unread message whole.
LONGEST_CHUNK: Final = 256


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
    """Result of one read: tokens in order, their final text, and the completion if it is the last.

    prompt: parts of the prompt's log probabilities, in order; they come before all tokens.
    rank: that drew the last token.
    """

    events: list[TokenEvent] = field(default_factory=list)
    text: str = ""
    completion: Completion | None = None
    prompt: list[PromptLogprobs] = field(default_factory=list)
    rank: int = 0


class TokenStream:
    """Tokens of one request. Writer: the engine. Reader: one coroutine.

    capacity: tokens that may wait for the reader; beyond it the writer gets SlowReader.
    interval: tokens that `read` waits for, the first and the last excepted.
    on_close: called once when the reader leaves or has seen the end, with the error that close() got.
    """

    def __init__(
        self, capacity: int, interval: int, on_close: Callable[[EpServerError | None], None]
    ) -> None:
        self._capacity = capacity
        self._interval = interval
        self._on_close = on_close
        self._held: list[_Held] = []
        self._prompt: list[PromptLogprobs] = []
        self._completion: Completion | None = None
        self._needed = 1  # the first token is sent alone: that is time to first token
        self._error: EpServerError | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self.ended else "open"
        return f"<TokenStream {state}, {len(self._held)}/{self._capacity} tokens>"

    @property
    def closed(self) -> bool:
        """True once the reader left or has read the end."""
        return self._closed

    @property
    def ended(self) -> bool:
        """True once the writer has ended the stream."""
        return self._closed or self._error is not None or self._completion is not None

    def put_prompt(self, scored: PromptLogprobs) -> None:
        """Queues log probabilities of the prompt. They are bounded by the prompt, not by `capacity`."""
        if self.ended:
            raise InternalError(f"prompt of request {scored.number} after the end of its stream")
        self._prompt.append(scored)
        self._wake()

    def put(self, event: TokenEvent, text: str, rank: int = 0) -> None:
        """Queues a token that a rank has drawn, and the text that it made final.

        Raises: SlowReader when more than `capacity` tokens wait; the caller ends the request with it.
        """
        if self.ended:
            raise InternalError(f"token of request {event.number} after the end of its stream")
        if len(self._held) >= self._capacity:
            raise SlowReader(f"the reader is {self._capacity} tokens behind, the limit of grpc.stream_buffer")
        self._held.append(_pack(event, text, rank))
        self._wake()

    def finish(self, completion: Completion) -> None:
        """Ends the stream normally; waiting tokens can still be read."""
        if not self.ended:
            self._completion = completion
            self._wake()

    def fail(self, error: EpServerError) -> None:
        """Ends the stream with an error; `read` raises it after the waiting tokens."""
        if not self.ended:
            self._error = error
            self._wake()

    def close(self, error: EpServerError | None = None) -> None:
        """Closes the reader's side. error: why the server ends the call. Idempotent."""
        if not self._closed:
            self._closed, self._error = True, error or self._error
            self._held, self._prompt = [], []
            self._on_close(error)

    async def read(self) -> Chunk:
        """Waits for `interval` tokens or the end, then takes up to LONGEST_CHUNK waiting tokens.

        The last chunk has a completion.

        Raises: the error that the stream was ended with.
        """
        await _any_ready([self])
        return self._take()

    def _take(self) -> Chunk:
        if self._error is not None and not self._held and not self._prompt:
            raise self._error
        prompt, self._prompt = self._prompt, []
        longest = max(self._interval, LONGEST_CHUNK)
        taken, self._held = self._held[:longest], self._held[longest:]
        if taken:
            self._needed = self._interval
        text = "".join(text for _, text, _, _ in taken)
        completion = None if self._held else self._completion
        rank = taken[-1][3] if taken else 0
        return Chunk([_unpack(held) for held in taken], text, completion, prompt, rank)

    def _ready(self) -> bool:
        if self._closed:
            raise self._error or InternalError("read from a closed stream")
        return len(self._held) >= self._needed or self.ended or bool(self._prompt)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._ready():
            self._waiter.set_result(None)


# A waiting token: alternatives as (id, logprob, id, logprob, ...), a sixth of the memory of tuples.
_Held = tuple[TokenEvent, str, "array[float] | None", int]


def _pack(event: TokenEvent, text: str, rank: int) -> _Held:
    if not event.top:
        return event, text, None, rank
    return event._replace(top=()), text, array("d", chain.from_iterable(event.top)), rank


def _unpack(held: _Held) -> TokenEvent:
    event, _, top, _ = held
    if top is None:
        return event
    pairs = zip(top[::2], top[1::2], strict=True)
    return event._replace(top=tuple((int(token), logprob) for token, logprob in pairs))


async def merged(streams: Sequence[TokenStream], *, prompt: bool = False) -> AsyncIterator[tuple[int, Chunk]]:
    """Yields (index, chunk) in order of arrival until every stream completed; none starves another.

    Args:
        prompt: the first stream has log probabilities of the prompt; they precede the tokens of all.
    Raises: the error that one of them was ended with.
    """
    left = dict(enumerate(streams))
    while prompt:
        chunk = await streams[0].read()
        prompt = not chunk.events
        if chunk.completion is not None:
            del left[0]
        yield 0, chunk
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
