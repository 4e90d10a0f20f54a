"""A leader over FakeRanks, its port for other nodes, and a node that relays to it: all in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ep_server.client import Target
from ep_server.cluster.relay import SERVICES, Relay, RelaySettings, open_channel, relay_port
from ep_server.config import GrpcConfig
from ep_server.frontend.doors import installed_doors, services
from ep_server.frontend.health import Health
from ep_server.frontend.port import Port
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.frontend import Served, serving
from tests.support.raw_client import RawClient

NODES, RANKS = 3, 2  # of each node
NODE = 1  # the one that relays
Shown = Callable[[], tuple[tuple[str, str], ...]]


@dataclass
class Heard:
    """A RelayObserver that keeps what it heard."""

    began: int = 0
    ended: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def on_relay_began(self) -> None:
        self.began += 1

    def on_relay_ended(self, status: str) -> None:
        self.ended.append(status)

    def on_relay_refused(self, status: str) -> None:
        self.refused.append(status)


@dataclass
class Follower:
    """A node that relays. leader: host:port that it relays to."""

    relay: Relay
    client: RawClient
    heard: Heard
    leader: str


@dataclass
class Relayed:
    """client: of the leader's own port."""

    served: Served
    node: Follower
    for_nodes: Port

    @property
    def ranks(self) -> FakeRanks:
        return self.served.ranks


@asynccontextmanager
async def relaying(
    leader: str, grpc: GrpcConfig | None = None, target: Target | None = None, token: str | Shown = ""
) -> AsyncIterator[Follower]:
    """A node that relays to an address. token: that it shows there, or what gives its metadata."""
    config = grpc or GrpcConfig(port=0)
    doors = services(installed_doors(config))
    channel, heard = open_channel(leader), Heard()
    health = Health(tuple(service.full_name for service in (*SERVICES, *doors)))
    pairs = (("authorization", f"Bearer {token}"),) if token else ()
    shown = (lambda: pairs) if isinstance(token, str) else token
    settings = RelaySettings(NODE, leader, config.max_streams, config.unread_seconds)
    relay = Relay(channel, settings, heard, shown, doors)
    port = relay_port(config, relay, health)
    address = await port.open()
    health.set(serving=True)
    client = RawClient(dataclasses.replace(target or Target(""), address=address))
    try:
        yield Follower(relay, client, heard, leader)
    finally:
        await client.close()
        await relay.closed(5.0)
        await port.close()
        await channel.close()
    assert relay.open_streams == 0 and heard.began == len(heard.ended)


@asynccontextmanager
async def listening(add: Any, config: GrpcConfig | None = None) -> AsyncIterator[tuple[Port, str]]:
    """A server with what `add(server)` adds, on a free port. Yields: (port, host:port)."""
    config = config or GrpcConfig(port=0)
    port = Port(config, frozenset())
    add(port.server)
    address = await port.open()
    try:
        yield port, address
    finally:
        await port.close()


@asynccontextmanager
async def relayed(
    ranks: FakeRanks | None = None,
    *,
    grpc: GrpcConfig | None = None,
    target: Target | None = None,
    cluster_token: tuple[str, str | Shown] = ("", ""),
    **values: Any,
) -> AsyncIterator[Relayed]:
    """The whole. grpc, target: of the node that relays. cluster_token: (the leader's file, what is shown)."""
    values = {"cluster__nodes": NODES, "parallel__ranks": RANKS, **values}
    port = GrpcConfig(port=0, token_file=cluster_token[0])
    async with (
        serving(ranks or FakeRanks(NODES * RANKS), **values) as served,
        listening(served.server.add_relayed, port) as (for_nodes, address),
        relaying(address, grpc, target, cluster_token[1]) as node,
    ):
        yield Relayed(served, node, for_nodes)
        await served.idle()
