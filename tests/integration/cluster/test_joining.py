"""Who is let in at the rendezvous, over real connections, and what others hear. No rank is started."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

import ep_server
from ep_server.cluster import follower
from ep_server.cluster.claim import Claim, claim_of, hello_of
from ep_server.cluster.discovery import NodePlace
from ep_server.cluster.follower import Joining, joined
from ep_server.cluster.leader import Leader
from ep_server.cluster.link import Link
from ep_server.errors import StartupError, Unavailable
from ep_server.ranks.hosts import Rank, ended
from ep_server.v1 import nodes_pb2 as pb
from tests.support.cluster.rendezvous import (
    IGNORED,
    MODEL,
    NODES,
    WAIT,
    config_of,
    rendezvous,
    spawn,
)
from tests.support.ports import free_port


def other_shape(claim: Claim) -> Claim:
    return replace(claim, model=claim.model | {"config.json hidden_size": 1})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: replace(c, version="0.0"), "node 1: version 0.0, node 0 has " + ep_server.__version__),
        (
            lambda c: replace(c, config=c.config | {"scheduler.block_size": 32}),
            "node 1: scheduler.block_size = 32, node 0 has 16",
        ),
        (other_shape, "node 1: model: config.json hidden_size = 1, node 0 has 128"),
        (lambda c: replace(c, node=3), "cluster.node_rank = 3: must be 1 to 2, node 0 has 3 nodes"),
        (lambda c: replace(c, node=0), "cluster.node_rank = 0: must be 1 to 2, node 0 has 3 nodes"),
    ],
    ids=["version", "option", "model", "beyond", "leader"],
)
async def test_a_node_that_differs_hears_in_what(change: Callable[[Claim], Claim], expected: str) -> None:
    async with rendezvous() as meeting:
        own = meeting.claim(1)
        assert await meeting.refused(change(own)) == expected
        async with asyncio.timeout(WAIT), meeting.join(own) as link:  # node 0 still takes the right one
            assert link.reason == ""


async def test_node_number_is_free_again_when_its_node_leaves() -> None:
    async with rendezvous() as meeting, asyncio.timeout(WAIT):
        claim = meeting.claim(1)
        async with meeting.join(claim) as first:
            assert "another node joined under this number" in await meeting.refused(claim)
            assert first.reason == ""  # it lives, and stays
        while "joined=[]" not in repr(meeting.leader):  # it has to notice
            await asyncio.sleep(0)
        async with meeting.join(claim) as link:
            assert link.reason == ""


async def test_the_end_tells_all_nodes_code_and_reason() -> None:
    heard: dict[int, list[pb.NodeMessage]] = {1: [], 2: []}
    async with rendezvous() as meeting, AsyncExitStack() as nodes, asyncio.timeout(WAIT):
        links: list[Link] = []
        for node in (1, 2):
            hello = hello_of(meeting.claim(node))
            links.append(
                await nodes.enter_async_context(joined(meeting.joining(), hello, heard[node].append))
            )
            meeting.waiting.cancel()  # both come, and no rank shall start
        meeting.leader.publish(serving=True)
        await meeting.leader.close(1, "rank 3 was lost")
        assert [await link.ended() for link in links] == ["closed the link"] * 2
    for messages in heard.values():
        assert [m.WhichOneof("kind") for m in messages] == ["state", "end"]
        assert (messages[1].end.code, messages[1].end.reason) == (1, "rank 3 was lost")


async def test_a_node_that_was_told_to_stop_says_so() -> None:
    asked = asyncio.Event()
    async with rendezvous() as meeting, asyncio.timeout(WAIT):
        meeting.leader.on_stop_asked = asked.set
        async with meeting.join(meeting.claim(1)) as link:
            link.send(stop_asked=pb.StopAsked())
            await asked.wait()


async def test_all_ranks_get_the_smallest_kv_blocks_and_global_numbers() -> None:
    place = NodePlace(0, 2, "127.0.0.1", free_port())
    options = {"cluster__nodes": 2, "parallel__ranks": 2, "model__name": "silent"}
    leader = Leader(config_of(0, **options), place, module="tests.support.ranks.odd_rank")
    await leader.open(lambda server: None)
    started: list[Rank] = []
    spawning = asyncio.create_task(spawn(leader, IGNORED, started.append))
    hello = hello_of(claim_of(config_of(1, **options))[0])
    heard: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()
    joining = Joining(place.address, None, tuple, WAIT, 5.0)
    try:
        async with asyncio.timeout(WAIT), joined(joining, hello, heard.put_nowait) as link:
            plan = (await heard.get()).plan
            assert list(plan.nodes) == [0, 1]
            link.send(planned=pb.Planned(group=plan.group, kv_blocks=7))  # of a host with little memory
            assert (await heard.get()).spawn.kv_blocks == 7
            await spawning
            assert [rank.rank for rank in started] == [0, 1, 2, 3]
            started[3].send(b"for rank 3")
            frame = (await heard.get()).rank_frame
            assert (frame.rank, frame.payload) == (3, b"for rank 3")
    finally:
        for rank in started[:2]:
            rank.signal(signal.SIGKILL)
        await ended(started, WAIT)
        for rank in started:
            rank.close()
        await leader.close(0, "")


async def test_node_0_alone_warns_of_unread_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(MODEL, tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"logit_scale": 0.5}))
    async with rendezvous(model__path=str(tmp_path / "copy")) as meeting:
        own = meeting.claim(1)
        async with asyncio.timeout(WAIT), meeting.join(own):
            pass
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if "logit_scale" in text] == [
        "there are keys of config.json that are not read (1: logit_scale)"
    ]


async def test_nodes_that_do_not_come_are_named_with_the_last_refusal() -> None:
    for seconds in (2.0, 15.0):  # the second one if a busy machine has let the first one pass
        async with rendezvous(cluster__connect_seconds=seconds) as meeting, asyncio.timeout(WAIT):
            await meeting.refused(replace(meeting.claim(2), version="0"))
            async with meeting.join(meeting.claim(1)):
                with pytest.raises(StartupError) as caught:
                    await meeting.waiting
        if not str(caught.value).startswith("nodes 1, 2 "):
            break
    expected = f"node 2 did not join within {seconds:g} s (refused: node 2: version 0, "
    assert str(caught.value).startswith(expected)


async def test_a_refusal_that_beats_the_first_write_is_still_named() -> None:
    """gRPC ends about half of such calls as INTERNAL, if the server runs beside this event loop."""
    server = grpc.server(ThreadPoolExecutor(1))  # it knows no method
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    joining = Joining(f"127.0.0.1:{port}", None, tuple, WAIT, 5.0)
    try:
        for _ in range(10):
            with pytest.raises(StartupError, match="refuses this node: UNIMPLEMENTED"):
                async with asyncio.timeout(WAIT), joined(joining, pb.Hello(), lambda _: None):
                    pass
    finally:
        await asyncio.to_thread(server.stop(0).wait, WAIT)


async def test_a_leader_that_never_comes_is_named() -> None:
    async with rendezvous() as meeting:
        claim = meeting.claim(1)
        nowhere = replace(meeting, place=NodePlace(1, NODES, "127.0.0.1", free_port()))
        message = await nowhere.refused(claim, cluster__connect_seconds=1.0)
    why = "(UNAVAILABLE: |it does not answer$)"
    assert re.match(f"node 0 at {nowhere.place.address} was not reached in 1 s: {why}", message), message


async def test_a_node_that_is_early_waits_for_the_leader() -> None:
    place = NodePlace(0, NODES, "127.0.0.1", free_port())
    claim, _ = claim_of(config_of(1))
    early = Joining(place.address, None, tuple, WAIT, 5.0)

    async def come() -> str:
        async with joined(early, hello_of(claim), lambda _: None) as link:
            return link.reason

    coming = asyncio.create_task(come())
    await asyncio.sleep(0.3)
    assert not coming.done()
    leader = Leader(config_of(0), place)
    await leader.open(lambda server: None)
    waiting = asyncio.create_task(spawn(leader, IGNORED))
    async with asyncio.timeout(WAIT):
        assert await coming == ""
    waiting.cancel()
    await asyncio.wait((waiting,))
    await leader.close(0, "")


async def test_a_join_that_is_cancelled_as_a_call_ends_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3,000 joins that nobody answered and that were cancelled, gRPC let 20 go on."""
    waits = asyncio.Event()

    async def first(call: Any) -> AsyncIterator[pb.Bundle]:
        waits.set()
        try:
            await asyncio.sleep(WAIT)
        except asyncio.CancelledError:  # as gRPC does, at that moment
            raise Unavailable("UNAVAILABLE: connection refused") from None
        raise AssertionError("not cancelled")

    monkeypatch.setattr(follower, "_first", first)
    hello = hello_of(claim_of(config_of(1))[0])

    async def join() -> None:
        async with joined(Joining(f"127.0.0.1:{free_port()}", None, tuple, WAIT, 5.0), hello, lambda _: None):
            pass

    async with asyncio.timeout(WAIT):
        joining = asyncio.create_task(join())
        await waits.wait()
        joining.cancel()
        await asyncio.wait((joining,))
    assert joining.cancelled()
