"""The bounded queue between engine and reader."""

from __future__ import annotations

import asyncio

import pytest

from ep_server.errors import DeadlineExceeded, InternalError, SlowReader
from ep_server.records import FinishReason, TokenEvent
from ep_server.stream import Completion, TokenStream, merged

END = Completion(FinishReason.LENGTH, None, 0, 1, 0.0, 0.0, 0.0, 0.0)


def stream(capacity: int = 8, interval: int = 1) -> tuple[TokenStream, list[int]]:
    closed: list[int] = []
    return TokenStream(capacity, interval, lambda: closed.append(1)), closed


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


async def test_a_read_waits_for_the_interval_but_not_for_the_first_token() -> None:
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
    with pytest.raises(SlowReader, match="2 tokens wait"):
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
