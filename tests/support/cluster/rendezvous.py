"""Node 0 that waits for others, over real connections. No rank is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ep_server
from ep_server.cluster.claim import Claim, claim_of, hello_of
from ep_server.cluster.discovery import NodePlace
from ep_server.cluster.follower import Joining, joined
from ep_server.cluster.leader import Leader
from ep_server.cluster.security import channel_credentials, token_metadata
from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.ranks.hosts import Rank
from ep_server.ranks.process import RankCallbacks
from tests.support.ports import free_port

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
NODES = 3
WAIT = 60.0  # seconds after which a test has failed
IGNORED = RankCallbacks(lambda *_: None, lambda *_: None, lambda *_: None)


def config_of(node: int, **options: Any) -> Config:
    values = {
        "model.path": str(MODEL),
        "cluster.nodes": NODES,
        "cluster.node_rank": node,
        "cluster.connect_seconds": WAIT,
        "parallel.threads_per_rank": 1,
    }
    return Config.from_values(values | {name.replace("__", "."): value for name, value in options.items()})


async def spawn(
    leader: Leader, callbacks: RankCallbacks, started: Callable[[Rank], None] = lambda rank: None
) -> None:
    """The first group of ranks, once all nodes have joined."""
    await leader.all_joined()
    await leader.group().spawn(callbacks, started)


@dataclass
class Rendezvous:
    """Node 0, which waits. options: that all nodes share. waiting: its spawn, which needs all nodes."""

    leader: Leader
    place: NodePlace
    options: dict[str, Any]
    waiting: asyncio.Task[None]

    def joining(self, **options: Any) -> Joining:
        cluster = config_of(1, **(self.options | options)).cluster
        return Joining(
            self.place.address,
            channel_credentials(cluster),
            token_metadata(cluster),
            cluster.connect_seconds,
            cluster.silent_seconds,
        )

    def claim(self, node: int, **options: Any) -> Claim:
        return claim_of(config_of(node, **(self.options | options)))[0]

    def join(self, claim: Claim, **options: Any) -> Any:
        """`async with` gives the link of a node that makes this claim."""
        return joined(self.joining(**options), hello_of(claim), lambda _: None)

    async def refused(self, claim: Claim, **options: Any) -> str:
        with pytest.raises(StartupError) as caught:
            async with asyncio.timeout(WAIT), self.join(claim, **options):
                pass
        return str(caught.value)


@asynccontextmanager
async def rendezvous(**options: Any) -> AsyncIterator[Rendezvous]:
    place = NodePlace(0, NODES, "127.0.0.1", free_port())
    config = config_of(0, **options)
    leader = Leader(config, place)
    await leader.open(lambda server: None)
    waiting = asyncio.create_task(spawn(leader, IGNORED))
    try:
        yield Rendezvous(leader, place, options, waiting)
    finally:
        waiting.cancel()
        await asyncio.wait((waiting,))
        await leader.close(0, "")
