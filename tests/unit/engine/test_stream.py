"""The bounded queue between engine and reader."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from ep_server.engine.stream import LONGEST_CHUNK, Completion, TokenStream, merged
from ep_server.errors import DeadlineExceeded, EpServerError, InternalError, SlowReader
from ep_server.frontend.unread import read_in_time
from ep_server.records import FinishReason, TokenEvent

END = Completion(FinishReason.LENGTH, None, 0, 1, 0.0, 0.0, 0.0, 0.0)


def stream(capacity: int = 8, interval: int = 1) -> tuple[TokenStream, list[int]]:
    closed: list[int] = []
    return TokenStream(capacity, interval, lambda _: closed.append(1)), closed


def put(target: TokenStream, *tokens: int) -> None:
    for token in tokens:
        target.put(TokenEvent(1, token), chr(token))


async def ids(target: TokenStream) -> list[int]:
    return [event.token_id for event in (await target.read()).events]


async def test_a_read_takes_all_there_is() -> None:
    target, _ = stream()
    put(target, 65, 66, 67)
    chunk = await target.read()
    assert [event.token_id for event in chunk.events] == [65, 66, 67]
    assert (chunk.text, chunk.completion) == ("ABC", None)


async def test_read_waits_for_the_interval_except_for_first_token() -> None:
    target, _ = stream(interval=3)
    put(target, 1)
    assert await ids(target) == [1]
    waiting = asyncio.ensure_future(target.read())
    await asyncio.sleep(0)
    put(target, 2, 3)
    await asyncio.sleep(0)
    assert not waiting.done()
    put(target, 4)
    assert [event.token_id for event in (await waiting).events] == [2, 3, 4]
    put(target, 5)
    target.finish(END)
    assert (await target.read()).completion is END


async def test_a_cancelled_read_has_taken_nothing() -> None:
    target, _ = stream()
    waiting = asyncio.ensure_future(target.read())
    await asyncio.sleep(0)
    put(target, 7)  # the reader is woken and cancelled in the same turn
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await ids(target) == [7]


async def test_a_full_stream_refuses() -> None:
    target, _ = stream(capacity=2)
    put(target, 1, 2)
    with pytest.raises(SlowReader, match="2 tokens behind"):
        put(target, 3)
    assert await ids(target) == [1, 2]
    put(target, 3)


async def test_tokens_before_an_error_are_read_first() -> None:
    target, _ = stream(interval=5)
    put(target, 1)
    target.fail(DeadlineExceeded("late"))
    target.finish(END)  # ended already
    assert await ids(target) == [1]
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="late"):
            await target.read()


async def test_closing() -> None:
    target, closed = stream()
    put(target, 1)
    target.close()
    target.close()
    assert closed == [1] and target.ended
    with pytest.raises(InternalError, match="after the end"):
        put(target, 2)
    with pytest.raises(InternalError, match="closed stream"):
        await target.read()
    assert "closed, 0/8" in repr(target)


async def test_merged_streams_take_turns_and_end_each_by_itself() -> None:
    streams = [stream()[0] for _ in range(3)]
    reader = merged(streams)
    put(streams[0], 1)
    assert (await anext(reader))[0] == 0
    put(streams[0], 2)
    put(streams[2], 3)
    taken = [await anext(reader) for _ in range(2)]
    assert {index: [e.token_id for e in chunk.events] for index, chunk in taken} == {0: [2], 2: [3]}
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    streams[1].finish(END)
    index, chunk = await waiting
    assert (index, chunk.completion) == (1, END)
    for left in (streams[2], streams[0]):
        left.finish(END)
    assert [(i, c.completion) async for i, c in reader] == [(2, END), (0, END)]  # 2 is next


async def test_a_merged_stream_that_fails_says_so_after_its_tokens() -> None:
    streams = [stream()[0] for _ in range(2)]
    reader = merged(streams)
    put(streams[1], 4)
    streams[1].fail(DeadlineExceeded("too late"))
    index, chunk = await anext(reader)
    assert index == 1 and [e.token_id for e in chunk.events] == [4]
    with pytest.raises(DeadlineExceeded):
        await anext(reader)


async def test_a_cancelled_merged_read_has_taken_nothing() -> None:
    streams = [stream()[0] for _ in range(2)]
    reading = asyncio.ensure_future(anext(merged(streams)))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    put(streams[1], 9)
    assert await ids(streams[1]) == [9]


async def test_a_read_takes_only_so_much() -> None:
    """gRPC holds a whole message that its caller does not read, so messages stay small."""
    target, _ = stream(capacity=1000)
    put(target, *range(LONGEST_CHUNK + 1))
    target.finish(END)
    chunk = await target.read()
    assert (len(chunk.events), len(chunk.text), chunk.completion) == (LONGEST_CHUNK, LONGEST_CHUNK, None)
    chunk = await target.read()
    assert ([event.token_id for event in chunk.events], chunk.completion) == ([LONGEST_CHUNK], END)


async def test_alternatives_wait_in_little_memory() -> None:
    """A stream that nobody reads holds them until its end: as tuples they took 2 kB a token."""
    target, _ = stream(capacity=500)
    tracemalloc.start()
    try:
        for number in range(500):
            target.put(
                TokenEvent(1, number, -0.5, tuple((1000 + i, -0.5 - number - i) for i in range(20))), ""
            )
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 500 * 1000
    (first, *_), last = (await target.read()).events, (await target.read()).events[-1]
    assert first.top[:2] == ((1000, -0.5), (1001, -1.5)) and len(first.top) == 20
    assert last.top[-1] == (1019, -518.5)


async def test_a_closed_stream_raises_what_closed_it() -> None:
    target, _ = stream()
    target.close(SlowReader("unread"))
    with pytest.raises(SlowReader, match="unread"):
        await target.read()


async def test_only_a_message_that_blocks_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ends = 0.0, list[EpServerError]()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)

    async def messages() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    reader = read_in_time(messages(), 1.0, ends.append)
    for number in range(2):
        assert await anext(reader) == number
        now += 0.9
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ends == []  # 1.8 s in all, never 1 s at once
    assert await anext(reader) == 2
    now += 1.0
    while not ends:
        await asyncio.sleep(0)
    assert isinstance(ends[0], SlowReader) and "grpc.unread_seconds = 1" in str(ends[0])
