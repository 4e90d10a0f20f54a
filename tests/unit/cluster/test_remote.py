"""The ranks of another node as the launcher sees them: what comes over the link, and what goes over it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ep_server.cluster.link import Link
from ep_server.cluster.node_group import RemoteRanks
from ep_server.errors import InternalError
from ep_server.ranks.process import RankCallbacks
from ep_server.v1 import nodes_pb2 as pb


@dataclass
class Heard:
    """Everything a launcher would hear, in order."""

    said: list[tuple[Any, ...]] = field(default_factory=list)

    def callbacks(self) -> RankCallbacks:
        def keep(kind: str) -> Any:
            return lambda rank, value: self.said.append((kind, rank, value))

        return RankCallbacks(keep("frame"), keep("closed"), keep("exit"), keep("lost"))


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    made = Link(lambda _: None, 60.0)
    yield made
    made.end("the test is over")


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def node(link: Link, heard: Heard) -> RemoteRanks:
    return RemoteRanks(1, range(2, 4), link, heard.callbacks())


async def sent(link: Link) -> list[pb.NodeMessage]:
    link.finish()
    return [message async for bundle in link.outgoing() for message in bundle.messages]


async def test_what_ranks_say_reaches_their_owner(node: RemoteRanks, heard: Heard) -> None:
    node.on_message(pb.NodeMessage(spawned=pb.Spawned(pids=[70, 71])))
    node.on_message(pb.NodeMessage(rank_frame=pb.RankFrame(rank=3, payload=b"x")))
    node.on_message(pb.NodeMessage(rank_closed=pb.RankClosed(rank=2, reason="closed its channel")))
    node.on_message(pb.NodeMessage(rank_exited=pb.RankExited(rank=2, code=-9)))
    node.on_message(pb.NodeMessage(rank_exited=pb.RankExited(rank=2, code=0)))  # an end comes once
    assert heard.said == [("frame", 3, b"x"), ("closed", 2, "closed its channel"), ("exit", 2, -9)]
    assert [(rank.rank, rank.pid, rank.returncode) for rank in node.ranks] == [(2, 70, -9), (3, 71, None)]
    assert [rank.exited.is_set() for rank in node.ranks] == [True, False]


async def test_frames_and_signals_go_over_the_link_in_order(node: RemoteRanks, link: Link) -> None:
    first, second = node.ranks
    first.send(b"one")
    second.send(b"two")
    assert first.buffered == second.buffered > 6
    second.signal(signal.SIGTERM)
    node.on_message(pb.NodeMessage(rank_exited=pb.RankExited(rank=2, code=0)))
    first.signal(signal.SIGKILL)  # it has ended
    messages = await sent(link)
    assert [(m.rank_frame.rank, m.rank_frame.payload) for m in messages[:2]] == [(2, b"one"), (3, b"two")]
    assert [(m.rank_signal.rank, m.rank_signal.number) for m in messages[2:]] == [(3, signal.SIGTERM)]


@pytest.mark.parametrize("how", ["lost", "failed"])
async def test_a_node_that_is_gone_is_one_sign_for_all_its_ranks(
    how: str, node: RemoteRanks, heard: Heard
) -> None:
    if how == "lost":
        node.lost("closed the link")
    else:
        node.on_message(pb.NodeMessage(failed=pb.Failed(message="closed the link")))
    node.lost("once more")
    assert heard.said == [("lost", 2, "node 1 (ranks 2-3) closed the link")]
    async with asyncio.timeout(10):
        for rank in node.ranks:
            await rank.exited.wait()
    assert [rank.returncode for rank in node.ranks] == [None, None]


async def test_a_node_that_leaves_after_its_ranks_is_no_loss(node: RemoteRanks, heard: Heard) -> None:
    for rank in (2, 3):
        node.on_message(pb.NodeMessage(rank_exited=pb.RankExited(rank=rank, code=0)))
    node.lost("closed the link")
    assert heard.said == [("exit", 2, 0), ("exit", 3, 0)]


@pytest.mark.parametrize(
    "message",
    [
        pb.NodeMessage(),
        pb.NodeMessage(hello=pb.Hello()),
        pb.NodeMessage(end=pb.End()),
        pb.NodeMessage(rank_frame=pb.RankFrame(rank=1)),
        pb.NodeMessage(rank_exited=pb.RankExited(rank=4)),
    ],
    ids=lambda message: message.WhichOneof("kind"),
)
async def test_what_no_node_says_of_its_ranks_is_an_error(
    message: pb.NodeMessage, node: RemoteRanks, heard: Heard
) -> None:
    with pytest.raises(InternalError):
        node.on_message(message)
    assert heard.said == []
