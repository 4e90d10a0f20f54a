"""Frames over a real socket pair: any cut, order, back-pressure, end of file; on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from ep_server.ranks.channel import (
    MAX_FRAME,
    ChannelClosed,
    FrameReader,
    FrontChannel,
    RankChannel,
    frame,
    probe,
)

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@given(payloads=st.lists(st.binary(max_size=40), max_size=8), data=st.data())
def test_frames_survive_any_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, got = FrameReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[begin:end])
    assert got == payloads


def test_a_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(ChannelClosed, match=f"{MAX_FRAME + 1} bytes"):
        FrameReader().feed(struct.pack("<I", MAX_FRAME + 1))


def test_poll_takes_what_is_there_and_does_not_block(pair: tuple[socket.socket, socket.socket]) -> None:
    channel = RankChannel(pair[0])
    assert channel.poll() == []
    pair[1].sendall(frame(b"one") + frame(b"") + frame(b"three")[:5])
    assert channel.poll() == [b"one", b""]
    pair[1].sendall(frame(b"three")[5:])
    assert channel.wait() == [b"three"]


def test_wait_gives_up_after_its_time(pair: tuple[socket.socket, socket.socket]) -> None:
    channel = RankChannel(pair[0])
    assert channel.wait(0.01) == []
    pair[1].sendall(frame(b"late"))
    assert channel.wait(60.0) == [b"late"]


def test_wait_returns_when_a_frame_arrives(pair: tuple[socket.socket, socket.socket]) -> None:
    channel, got = RankChannel(pair[0]), []
    waiting = threading.Thread(target=lambda: got.append(channel.wait()))
    waiting.start()
    pair[1].sendall(frame(b"wake"))
    waiting.join(10)
    assert got == [[b"wake"]]


def test_peer_close_is_an_error_after_its_last_frames(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    channel = RankChannel(pair[0])
    pair[1].sendall(frame(b"last"))
    assert channel.poll() == [b"last"]
    pair[1].close()
    with pytest.raises(ChannelClosed, match="exited"):
        channel.wait()
    with pytest.raises(ChannelClosed, match="exited"):
        channel.send(b"x")


def test_send_keeps_what_the_socket_does_not_take(pair: tuple[socket.socket, socket.socket]) -> None:
    channel, reader = RankChannel(pair[0]), FrameReader()
    payloads = [bytes([n]) * 100_000 for n in range(40)]  # far more than the socket holds
    for payload in payloads:
        channel.send(payload)
    got: list[bytes] = []
    pair[1].setblocking(False)
    while len(got) < len(payloads):
        with contextlib.suppress(BlockingIOError):
            got += reader.feed(pair[1].recv(1 << 20))
        channel.poll()
    assert got == payloads


def test_a_front_that_does_not_read_is_given_up(pair: tuple[socket.socket, socket.socket]) -> None:
    channel = RankChannel(pair[0], max_outbox=1 << 20, send_seconds=0.01)
    with pytest.raises(ChannelClosed, match=r"not read for 0\.01 s"):
        for _ in range(64):
            channel.send(bytes(1 << 20))


@LOOPS
def test_both_ends_keep_order(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    up = [bytes([n % 251]) * (n * n % 9000) for n in range(300)]
    down = [b"d" + payload for payload in up]

    async def front(ours: socket.socket) -> list[bytes]:
        got: list[bytes] = []
        closed = asyncio.get_running_loop().create_future()
        channel = await FrontChannel.connect(ours, got.append, closed.set_result)
        for payload in down:
            channel.send(payload)
        async with asyncio.timeout(20):
            assert await closed == "closed its channel"
        channel.send(b"nobody hears this")
        return got

    def rank(theirs: socket.socket) -> None:
        channel, got = RankChannel(theirs), []
        for payload in up:
            channel.send(payload)
        while len(got) < len(down):
            got += channel.wait()
        channel.drain(10)
        heard.extend(got)
        channel.close()

    heard: list[bytes] = []
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=rank, args=(theirs,))
    thread.start()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(front(ours)) == up
    thread.join(10)
    assert heard == down


@LOOPS
def test_the_front_does_not_block_on_a_rank_that_does_not_read(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def front() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            channel = await FrontChannel.connect(ours, lambda payload: None, lambda reason: None)
            for _ in range(100):
                channel.send(bytes(100_000))
            assert channel.buffered > 1_000_000
            channel.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(front())


@LOOPS
def test_garbage_closes_the_channel_once(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def front() -> list[str]:
        ours, theirs = socket.socketpair()
        reasons: list[str] = []
        came = asyncio.Event()

        def closed(reason: str) -> None:
            reasons.append(reason)
            came.set()

        with theirs:
            await FrontChannel.connect(ours, lambda payload: None, closed)
            theirs.sendall(b"\xff" * 64)
            async with asyncio.timeout(10):
                await came.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        return reasons

    with asyncio.Runner(loop_factory=new_loop) as runner:
        reasons = runner.run(front())
    assert len(reasons) == 1
    assert reasons[0].startswith("sent a frame of 4294967295 bytes")


@given(cut=st.integers(0, 30))
def test_probes_between_frames_survive_any_cut(cut: int) -> None:
    reader, stream = FrameReader(), frame(b"one") + probe(7) + frame(b"two")
    assert reader.feed(stream[:cut]) + reader.feed(stream[cut:]) == [b"one", b"two"]
    assert (reader.frames, reader.probe) == (2, 7)


def test_a_rank_answers_probes_while_it_waits(pair: tuple[socket.socket, socket.socket]) -> None:
    channel, reader = RankChannel(pair[0]), FrameReader()
    pair[1].sendall(frame(b"work") + probe(1))
    assert channel.wait() == [b"work"]  # the probe is behind it: no answer before this is done
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(100)
    channel.poll()  # between two steps
    with pytest.raises(BlockingIOError):
        pair[1].recv(100)
    assert channel.wait(0.01) == []
    reader.feed(pair[1].recv(100))
    assert reader.probe == 1
    pair[1].sendall(probe(1) + frame(b"more"))  # it was asked before it got work, and waited
    assert channel.wait() == [b"more"]
    reader.feed(pair[1].recv(100))
    assert reader.probe == 1


@LOOPS
def test_a_front_probes_only_ranks_that_wait(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def front() -> list[str]:
        ours, theirs = socket.socketpair()
        closed: list[str] = []
        channel = await FrontChannel.connect(ours, lambda _: None, closed.append)
        with theirs:
            channel.send(b"work")
            channel.watch(0.2)
            theirs.sendall(probe(0))  # from before the work
            await asyncio.sleep(1.0)
            assert closed == []
            theirs.sendall(probe(1))
            async with asyncio.timeout(10):
                while not closed:
                    await asyncio.sleep(0.01)
            assert theirs.recv(100) == frame(b"work") + probe(1)
        return closed

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(front()) == ["did not answer for 0.2 s while it had nothing to do"]


def test_a_rank_that_turns_out_to_be_busy_is_not_probed() -> None:
    async def front() -> list[str]:
        ours, theirs = socket.socketpair()
        closed: list[str] = []
        channel = await FrontChannel.connect(ours, lambda _: None, closed.append)
        with theirs:
            rank = RankChannel(theirs)
            channel.watch(0.2)
            rank.report(waiting=True)
            await asyncio.sleep(0.1)
            rank.report(waiting=False)
            await asyncio.sleep(1.0)
            assert closed == []
            channel.close()
        return closed

    assert asyncio.run(front()) == []
