"""The link between nodes without a network: order, back-pressure, signs of life, and every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from ep_server.cluster import link as link_module
from ep_server.cluster.link import BUNDLE_BYTES, STUCK, TICKS, Link
from ep_server.errors import InvalidArgument
from ep_server.v1 import nodes_pb2 as pb

LONG, SHORT = 60.0, 0.2  # seconds of silence


def frame(rank: int, payload: bytes = b"") -> pb.RankFrame:
    return pb.RankFrame(rank=rank, payload=payload)


async def ends(link: Link) -> str:
    async with asyncio.timeout(30):
        return await link.ended()


@asynccontextmanager
async def pair(
    heard: Callable[[pb.NodeMessage], None], silent_seconds: float = LONG
) -> AsyncIterator[tuple[Link, Link]]:
    """Two ends; what the first sends goes to `heard`, and the other way nothing is sent but signs of life."""
    ours, theirs = Link(lambda _: None, silent_seconds), Link(heard, silent_seconds)
    tasks = [
        asyncio.create_task(theirs.read(ours.outgoing())),
        asyncio.create_task(ours.read(theirs.outgoing())),
    ]
    try:
        yield ours, theirs
    finally:
        for link in (ours, theirs):
            link.end("the test is over")
        await asyncio.wait(tasks)


async def test_messages_arrive_in_order_whatever_their_size() -> None:
    got: list[tuple[int, int]] = []
    sizes = [0, 1, BUNDLE_BYTES, 10, 2 * BUNDLE_BYTES, 0, *range(50)]
    async with pair(lambda m: got.append((m.rank_frame.rank, len(m.rank_frame.payload)))) as (ours, theirs):
        for number, size in enumerate(sizes):
            ours.send(rank_frame=frame(number, bytes(size)))
        assert ours.buffered > sum(sizes)
        ours.finish()
        assert await ends(theirs) == "closed the link"
    assert got == list(enumerate(sizes))
    assert ours.buffered == 0


async def test_nothing_is_taken_after_the_end() -> None:
    """Another node may have the place: what the old one still says must not count as said by that."""
    got: list[int] = []
    link = Link(lambda m: got.append(m.rank_frame.rank), LONG)

    async def bundles() -> AsyncIterator[pb.Bundle]:
        yield pb.Bundle(messages=[pb.NodeMessage(rank_frame=frame(1))])
        link.end("said nothing")
        yield pb.Bundle(messages=[pb.NodeMessage(rank_frame=frame(2))])

    async with asyncio.timeout(30):
        await link.read(bundles())
    assert got == [1] and link.reason == "said nothing"


async def test_nothing_is_sent_after_the_end() -> None:
    link = Link(lambda _: None, LONG)
    link.send(rank_frame=frame(1))
    link.finish()
    link.send(rank_frame=frame(2))
    sent = [bundle async for bundle in link.outgoing()]
    assert [m.rank_frame.rank for bundle in sent for m in bundle.messages] == [1]
    link.end("first")
    link.end("second")
    link.send(rank_frame=frame(3))
    assert (link.reason, link.buffered) == ("first", 0)


async def test_signs_of_life_keep_an_idle_link() -> None:
    """Several silences long, nobody has anything to say."""
    async with pair(lambda _: None, SHORT) as (ours, theirs):
        await asyncio.sleep(3 * SHORT)
        assert (ours.reason, theirs.reason) == ("", "")


async def silence(over: Callable[[], bool]) -> AsyncIterator[pb.Bundle]:
    """Of a stream that breaks once it is over."""
    while not over():
        await asyncio.sleep(0.01)
    return
    yield pb.Bundle()


async def test_a_broken_stream_says_whether_the_other_side_was_silent() -> None:
    for ticks, reason in ((0, "closed the link"), (TICKS, f"was silent for {SHORT:g} s")):
        link = Link(lambda _: None, SHORT)
        async with asyncio.timeout(30):
            await link.read(silence(lambda link=link, ticks=ticks: link._silent >= ticks))
        assert link.reason == reason


async def test_a_silence_alone_is_borne_for_a_while() -> None:
    """The event loop of the other side is busy; gRPC breaks the stream of a process that is stopped."""
    link = Link(lambda _: None, SHORT)
    reading = asyncio.create_task(link.read(silence(lambda: False)))
    await asyncio.sleep(3 * SHORT)
    assert link.reason == ""
    assert await ends(link) == f"was silent for {STUCK * SHORT:g} s"
    reading.cancel()
    await asyncio.wait((reading,))


async def test_a_side_that_does_not_read_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_BUFFERED", 1000)
    link = Link(lambda _: None, LONG)
    link.send(rank_frame=frame(1, bytes(900)))
    assert link.reason == ""
    link.send(rank_frame=frame(1, bytes(900)))
    assert link.reason.startswith("left 18")


@pytest.mark.parametrize("error", [InvalidArgument("kind", "x", "y"), KeyError("x")])
async def test_what_is_not_understood_ends_the_link(error: Exception) -> None:
    def refuse(_: pb.NodeMessage) -> None:
        raise error

    async with pair(refuse) as (ours, theirs):
        ours.send(rank_frame=frame(1))
        assert (await ends(theirs)).startswith("sent an invalid message: ")
