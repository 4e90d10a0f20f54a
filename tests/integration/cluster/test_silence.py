"""Nodes that fall silent before ranks start, and those that only seem to. Over real connections."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from grpc import aio

from ep_server.cluster import follower
from ep_server.cluster import leader as leader_module
from ep_server.cluster import link as link_module
from ep_server.cluster.claim import Claim, claim_of, hello_of
from ep_server.cluster.discovery import NodePlace
from ep_server.cluster.leader import Leader
from ep_server.ranks.hosts import Rank, ended
from ep_server.v1 import nodes_pb2 as pb
from ep_server.v1 import nodes_pb2_grpc
from tests.support.cluster.joining_node import hold_up
from tests.support.cluster.rendezvous import (
    IGNORED,
    WAIT,
    Rendezvous,
    config_of,
    rendezvous,
    spawn,
)
from tests.support.ports import free_port


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence above gRPC, whose own threads go on in these tests, is not borne for longer.

    Nor does gRPC end a connection if a busy machine holds these threads up.
    """
    monkeypatch.setattr(link_module, "STUCK", 1)
    for module in (follower, leader_module):
        monkeypatch.setattr(module, "liveness", lambda _: link_module.liveness(2 * WAIT))


async def hello_alone(claim: Claim) -> AsyncIterator[pb.Bundle]:
    """What a host sends that is switched off then: nothing more, nor an end."""
    yield pb.Bundle(messages=[pb.NodeMessage(hello=hello_of(claim))])
    await asyncio.sleep(WAIT)


@pytest.mark.usefixtures("impatient")
async def test_returning_node_takes_over_its_broken_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        rendezvous(cluster__silent_seconds=1.0) as meeting,
        aio.insecure_channel(meeting.place.address) as channel,
    ):
        claim = meeting.claim(1)

        await nodes_pb2_grpc.NodesStub(channel).Join(hello_alone(claim)).read()
        async with asyncio.timeout(WAIT / 3), meeting.join(claim) as link:
            assert "claims its number; checking whether it is alive" in caplog.text
            assert "node 1 was silent for 1 s" in caplog.text
            assert "joined=[1]" in repr(meeting.leader)
            await asyncio.sleep(2.0)  # what is left of the old one does not end the new one
            assert link.reason == "" and "joined=[1]" in repr(meeting.leader)
            assert "another node joined under this number" in await meeting.refused(claim)


@pytest.mark.usefixtures("impatient")
async def test_second_claim_is_refused_only_once_the_first_is_alive() -> None:
    """The first may be a try of the same node whose connection broke unnoticed: it must not win for ever."""
    async with (
        rendezvous(cluster__silent_seconds=1.0) as meeting,
        aio.insecure_channel(meeting.place.address) as channel,
    ):
        claim = meeting.claim(1)

        stub = nodes_pb2_grpc.NodesStub(channel)
        silent = [stub.Join(hello_alone(claim)) for _ in range(3)]
        async with asyncio.timeout(WAIT / 3):
            for call in silent:  # each takes the place once the one before has fallen silent
                assert isinstance(await call.read(), pb.Bundle)
            async with meeting.join(claim) as link:
                assert "another node joined under this number" in await meeting.refused(claim)
                assert link.reason == ""


@pytest.mark.parametrize("first", [None, pb.Bundle(), pb.Bundle(messages=[pb.NodeMessage(end=pb.End())])])
async def test_who_does_not_say_hello_is_sent_away(first: pb.Bundle | None) -> None:
    async def say() -> AsyncIterator[pb.Bundle]:
        if first is not None:
            yield first
        await asyncio.sleep(WAIT)

    async with (
        rendezvous(cluster__silent_seconds=0.5) as meeting,
        aio.insecure_channel(meeting.place.address) as channel,
    ):
        call = nodes_pb2_grpc.NodesStub(channel).Join(say())
        with pytest.raises(aio.AioRpcError, match="must be Hello alone"):
            await call.read()


@pytest.mark.usefixtures("impatient")
async def test_node_that_stops_reading_is_lost_despite_queued_data() -> None:
    place = NodePlace(0, 2, "127.0.0.1", free_port())
    options = {"cluster__nodes": 2, "model__name": "silent", "cluster__silent_seconds": 0.5}
    leader = Leader(config_of(0, **options), place, module="tests.support.ranks.odd_rank")
    await leader.open(lambda server: None)
    started: list[Rank] = []
    lost: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    callbacks = replace(IGNORED, on_host_lost=lambda rank, why: lost.put_nowait((rank, why)))
    spawning = asyncio.create_task(spawn(leader, callbacks, started.append))
    hello = hello_of(claim_of(config_of(1, **options))[0])

    async def say() -> AsyncIterator[pb.Bundle]:
        yield pb.Bundle(messages=[pb.NodeMessage(hello=hello)])
        yield pb.Bundle(messages=[pb.NodeMessage(planned=pb.Planned(group=1, kv_blocks=7))])
        while not spawning.done():
            yield pb.Bundle()  # a heartbeat
            await asyncio.sleep(0.05)
        await asyncio.sleep(WAIT)

    try:
        # Long before gRPC itself gives a connection up.
        async with asyncio.timeout(WAIT / 3), aio.insecure_channel(place.address) as channel:
            call = nodes_pb2_grpc.NodesStub(channel).Join(say())
            await call.read()
            await spawning
            for _ in range(40):  # more than a connection takes in by itself
                started[1].send(bytes(1 << 20))
            assert await lost.get() == (1, "node 1 (rank 1) was silent for 0.5 s")
    finally:
        started[0].signal(signal.SIGKILL)
        await ended(started[:1], WAIT)
        started[0].close()
        await leader.close(0, "")


@asynccontextmanager
async def joined_process(meeting: Rendezvous) -> AsyncIterator[asyncio.subprocess.Process]:
    """Node 1 as a process of its own."""
    joining = meeting.joining()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.cluster.joining_node"),
        *(joining.address, str(joining.silent_seconds)),
        hello_of(meeting.claim(1)).SerializeToString().hex(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"joined\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_busy_event_loop_is_no_silence_a_stopped_process_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Either loop is held up for three silences, and so is every thread that needs the interpreter."""
    reason = b""
    for seconds in (1, 5):  # the second one if a busy machine has stopped a process for as long as the first
        async with (
            rendezvous(cluster__silent_seconds=float(seconds)) as meeting,
            asyncio.timeout(WAIT),
            joined_process(meeting) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            hold_up(3 * seconds)
            process.stdin.write(b"hold up\n")
            assert await process.stdout.readline() == b"went on\n"
            await asyncio.sleep(seconds)
            process.stdin.write(b"reason\n")
            reason = await process.stdout.readline()
            if reason != b"alive\n" or "joined=[1]" not in repr(meeting.leader):
                continue
            process.send_signal(signal.SIGSTOP)
            while "joined=[]" not in repr(meeting.leader):
                await asyncio.sleep(0.01)
            assert f"node 1 was silent for {seconds} s" in caplog.text
            return
    raise AssertionError(reason)
