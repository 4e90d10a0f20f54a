"""[1] The life of a node that does not lead: join node 0, run ranks for it, pass calls on to it, end with it.

The gRPC port opens first: health says that the process works, and its services follow what node 0 says. The
first SIGTERM or SIGINT has node 0 drain the whole server, the second ends this node at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ep_server.cluster.agent import Agent, Progress
from ep_server.cluster.claim import claim_of, hello_of
from ep_server.cluster.discovery import NodePlace, resolved
from ep_server.cluster.joining import Joining, joined
from ep_server.cluster.link import Link
from ep_server.cluster.relay import Relay, RelayObserver, RelaySettings
from ep_server.cluster.relay_port import add_public, open_channel, relay_port
from ep_server.cluster.security import channel_credentials, token_metadata
from ep_server.config import Config
from ep_server.frontend import control
from ep_server.frontend.control import open_control_port, public_names
from ep_server.frontend.endpoint import warn_if_open
from ep_server.frontend.health import Health
from ep_server.frontend.port import Port
from ep_server.ranks.hosts import WORKER
from ep_server.stop_signals import stop_signals
from ep_server.v1 import nodes_pb2 as pb

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 2.0  # for statuses to reach their callers


@dataclass(frozen=True, slots=True)
class FollowerHooks:
    """Who hears of a node's life. progress: as Ranks.start. serving: once, when the server takes requests."""

    progress: Progress
    serving: Callable[[], None]
    relayed: RelayObserver


class Follower:
    """A node under node 0. Create and use it inside a running event loop."""

    def __init__(self, config: Config, place: NodePlace, hooks: FollowerHooks, module: str = WORKER) -> None:
        self.config, self.place = config, place
        self.address = ""  # host:port once run() has bound it
        self._hooks, self._module = hooks, module
        self._leader = place.address
        self._credentials = channel_credentials(config.cluster)
        self._metadata = token_metadata(config.cluster)
        self._health = Health(public_names(config.grpc))
        self._agent: Agent | None = None
        self._link: Link | None = None
        self._end: pb.End | None = None
        self._drain: Callable[[], None] = lambda: None
        self._control_port: Port | None = None
        self._ending = False
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Node 0 says that the server takes requests."""
        return self._health.serving

    async def run(self, *, last: bool = False) -> int:
        """The whole life. last: as Server.run.

        Returns: exit code, 1 where node 0 or a rank was lost. Raises: StartupError.
        """
        channel = open_channel(self._leader, self._credentials)
        limits = self.config.grpc
        settings = RelaySettings(self.place.node, self._leader, limits.max_streams, limits.unread_seconds)
        relay = Relay(channel, settings, self._hooks.relayed, self._metadata)
        port = relay_port(limits, relay, self._health)
        self._drain = partial(
            port.drain, partial(add_public, config=limits, relay=relay, status=self._health)
        )
        with stop_signals(self.ask_to_stop, last=last):
            try:
                await self._open(port, relay)
                code = await self._member(relay)
            finally:
                self._health.set(serving=False)
                await relay.closed(LAST_WORDS_SECONDS)
                relay.end("this node stops")
                await port.close()
                if self._control_port is not None:
                    await self._control_port.close()
                await channel.close(None)
        log.info("stopped")
        return code

    def ask_to_stop(self) -> None:
        """Has node 0 drain the server; asked for a second time, ends this node at once."""
        if self._ending:
            return  # it does already, with the code that says why
        if self._stop_asked.is_set():
            self._stop_now.set()
            return
        self._stop_asked.set()
        if self._link is None:
            self._stop_now.set()
        else:
            self._link.send(stop_asked=pb.StopAsked())

    async def _open(self, port: Port, relay: Relay) -> None:
        warn_if_open(self.config.grpc)
        self.address = await port.open()
        add_control = partial(relay.add_to, names=(control.SERVICE_NAME,))
        self._control_port = await open_control_port(self.config.grpc, add_control)

    async def _member(self, relay: Relay) -> int:
        """From joining to the end of the server, unless a stop comes first. Returns: exit code."""
        member = asyncio.create_task(self._join_and_stay(relay))
        stop = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait((member, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not member.done():
            member.cancel()
            await asyncio.wait((member,))
            return 0
        return member.result()

    async def _join_and_stay(self, relay: Relay) -> int:
        claim, plan = await asyncio.to_thread(claim_of, self.config)
        cluster = self.config.cluster
        # gRPC asks for a name that is not there yet ever more seldom; Pods come up in any order.
        await resolved(self.place.rendezvous_host, cluster.connect_seconds)
        joining = Joining(
            self._leader,
            self._credentials,
            self._metadata,
            cluster.connect_seconds,
            cluster.silent_seconds,
        )
        log.info("going to node 0 at %s as node %d", self._leader, self.place.node)
        async with joined(joining, hello_of(claim), self._on_message) as link:
            self._link = link
            self._agent = Agent(self.config, plan, link, self._hooks.progress, self._module)
            log.info("node %d has joined node 0 at %s", self.place.node, self._leader)
            try:
                return self._ended(relay, await link.ended())
            finally:
                self._link = None
                await self._agent.end()

    def _ended(self, relay: Relay, reason: str) -> int:
        """What the end of the link means. Returns: exit code."""
        self._ending = True
        self._health.set(serving=False)
        if self._end is None or self._end.code:
            self._health.fail()
        if self._end is None:
            message = f"node 0 at {self._leader} {reason}"
            log.error("%s; every stream ends, this node stops", message)
            relay.end(f"{message}: the server ends")
            return 1
        if self._end.code:
            log.error("the server has ended: %s", self._end.reason)
        relay.refuse("the server has ended")  # the last words of streams may still be on their way
        return self._end.code

    def _on_message(self, message: pb.NodeMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "state":
            self._serve(message.state.serving)
        elif kind == "end":
            self._end = message.end
        elif self._agent is not None:
            self._agent.on_message(message)

    def _serve(self, serving: bool) -> None:
        was = self._health.serving
        self._health.set(serving=serving)
        if was and not serving:  # it does not serve again
            self._drain()
        if serving and not was:
            nodes, node = self.place.nodes, self.place.node
            log.info("serving by way of node 0 on %s, node %d of %d", self.address, node, nodes)
            self._hooks.serving()
