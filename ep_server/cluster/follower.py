"""[1] The life of a follower: join node 0, run ranks for it, forward calls to it, stop with it.

The gRPC port opens first: health reports that the process works, and its services follow node 0's status.
At the first SIGTERM or SIGINT node 0 goes on without this node, which ends once its calls are over. If node 0
cannot, it drains the whole server. The second signal stops this node at once. Joining is retried until node 0
answers; a refusal is final. Units: seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from grpc import aio

from ep_server.cluster.agent import Agent, Progress
from ep_server.cluster.claim import claim_of, hello_of
from ep_server.cluster.discovery import NodePlace, resolved
from ep_server.cluster.link import Link, liveness
from ep_server.cluster.relay import Relay, RelayObserver, RelaySettings, add_public, open_channel, relay_port
from ep_server.cluster.security import channel_credentials, token_metadata
from ep_server.config import Config
from ep_server.errors import StartupError, Unavailable
from ep_server.frontend import control
from ep_server.frontend.control import open_control_port, public_names
from ep_server.frontend.doors import installed_doors, services
from ep_server.frontend.endpoint import warn_if_open
from ep_server.frontend.health import Health
from ep_server.frontend.port import Port
from ep_server.ranks.local_ranks import WORKER
from ep_server.stop_signals import stop_signals
from ep_server.v1 import nodes_pb2 as pb
from ep_server.v1 import nodes_pb2_grpc

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
STATUS_SECONDS = 2.0  # time for final statuses to reach their callers
LOG_EVERY = 10.0  # seconds between log lines while joining
# gRPC's own INTERNAL hides why node 0 refused before the first write. The next attempt may show it.
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)

OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, beside relayed calls
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


@dataclass(frozen=True, slots=True)
class Joining:
    """How to join. address: host:port of node 0. metadata: this node's token, read again at every attempt."""

    address: str
    credentials: grpc.ChannelCredentials | None
    metadata: Callable[[], tuple[tuple[str, str], ...]]
    connect_seconds: float
    silent_seconds: float


@asynccontextmanager
async def joined(
    joining: Joining, hello: pb.Hello, on_message: Callable[[pb.NodeMessage], None]
) -> AsyncIterator[Link]:
    """The link to node 0 once it has accepted this node; closed on exit.

    Raises: StartupError if node 0 refuses it, or cannot be reached for connect_seconds.
    """
    channel = _channel(joining)
    try:
        link, reading = await _join(channel, joining, hello, on_message)
        try:
            yield link
        finally:
            link.end("was closed here")
            reading.cancel()
            await asyncio.wait((reading,))
    finally:
        await channel.close(None)


async def _join(
    channel: aio.Channel, joining: Joining, hello: pb.Hello, on_message: Callable[[pb.NodeMessage], None]
) -> tuple[Link, asyncio.Task[None]]:
    loop = asyncio.get_running_loop()
    began = logged = loop.time()
    pause, why = FIRST_PAUSE, "it does not answer"
    while (left := began + joining.connect_seconds - loop.time()) > 0:
        link = Link(on_message, joining.silent_seconds)
        link.send(hello=hello)
        try:
            async with asyncio.timeout(left):
                return link, asyncio.create_task(link.read(await _accepted(channel, joining, link)))
        except TimeoutError:
            pass
        except Unavailable as error:
            why = str(error)
        if loop.time() - logged >= LOG_EVERY:
            logged = loop.time()
            log.info("node 0 at %s: %s; trying again", joining.address, why)
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)
    raise StartupError(f"node 0 at {joining.address} was not reached in {joining.connect_seconds:g} s: {why}")


async def _accepted(channel: aio.Channel, joining: Joining, link: Link) -> AsyncIterator[pb.Bundle]:
    """Tries to join once. As _first()."""
    call = nodes_pb2_grpc.NodesStub(channel).Join(link.outgoing(), metadata=joining.metadata())
    try:
        return await _first(call)
    except BaseException as error:
        call.cancel()
        link.end("was not accepted")
        task = asyncio.current_task()
        if isinstance(error, Unavailable) and task is not None and task.cancelling():
            raise asyncio.CancelledError from error  # gRPC loses it if the call ends just then
        raise


async def _first(call: Any) -> AsyncIterator[pb.Bundle]:
    """Waits until node 0 accepts this node, which its first bundle shows. Returns: all bundles.

    Raises: Unavailable if another attempt may succeed; StartupError.
    """
    try:
        first = await call.read()
    except aio.AioRpcError as error:
        if error.code() in AGAIN:
            raise Unavailable(f"{error.code().name}: {error.details()}") from None
        raise StartupError(_refused(error)) from None
    if not isinstance(first, pb.Bundle):
        raise Unavailable("it has ended")
    return _bundles(call, first)


async def _bundles(call: Any, first: pb.Bundle) -> AsyncIterator[pb.Bundle]:
    """All bundles. The first one was already read. Raises: aio.AioRpcError."""
    bundle = first
    while isinstance(bundle, pb.Bundle):  # else the stream ended
        yield bundle
        bundle = await call.read()


def _refused(error: aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return str(error.details())
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return "node 0 does not take the token of cluster.token_file"
    return f"node 0 refuses this node: {error.code().name}: {error.details()}"


def _channel(joining: Joining) -> aio.Channel:
    options = [*OPTIONS, *liveness(joining.silent_seconds)]
    if joining.credentials is None:
        return aio.insecure_channel(joining.address, options=options)
    return aio.secure_channel(joining.address, joining.credentials, options=options)


@dataclass(frozen=True, slots=True)
class FollowerHooks:
    """Callbacks. progress: as Ranks.start. serving: called once, when the server accepts requests."""

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
        self._doors = services(installed_doors(config.grpc))
        names = (service.full_name for service in self._doors)
        self.health = Health((*public_names(config.grpc), *names))
        self._agent: Agent | None = None
        self._link: Link | None = None
        self._end: pb.End | None = None
        self._drain: Callable[[], None] = lambda: None
        self._control_port: Port | None = None
        self._ending = False
        self._released = asyncio.Event()  # the server goes on without this node
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, *, last: bool = False) -> int:
        """Runs the follower until it ends. last: as Server.run.

        Returns: exit code, 1 if node 0 or a rank was lost. Raises: StartupError.
        """
        channel = open_channel(self._leader, self._credentials)
        limits = self.config.grpc
        settings = RelaySettings(self.place.node, self._leader, limits.max_streams, limits.unread_seconds)
        relay = Relay(channel, settings, self._hooks.relayed, self._metadata, self._doors)
        port = relay_port(limits, relay, self.health)
        self._drain = partial(port.drain, partial(add_public, config=limits, relay=relay, status=self.health))
        with stop_signals(self.ask_to_stop, last=last):
            try:
                await self._open(port, relay)
                code = await self._member(relay)
            finally:
                self.health.set(serving=False)
                await relay.closed(STATUS_SECONDS)
                relay.end("this node stops")
                await port.close()
                if self._control_port is not None:
                    await self._control_port.close()
                await channel.close(None)
        log.info("stopped")
        return code

    def ask_to_stop(self) -> None:
        """Asks node 0 to go on without this node; a second call stops this node at once."""
        if self._ending:
            return  # already ending, with the exit code that names the cause
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
        """Runs from joining to the end of the server, or until a stop. Returns: exit code."""
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
        claim, _ = await asyncio.to_thread(claim_of, self.config)
        cluster = self.config.cluster
        # gRPC retries an unknown name ever more rarely, and Pods start in any order.
        await resolved(self.place.rendezvous_host, cluster.connect_seconds)
        joining = Joining(
            self._leader,
            self._credentials,
            self._metadata,
            cluster.connect_seconds,
            cluster.silent_seconds,
        )
        log.info("joining node 0 at %s as node %d", self._leader, self.place.node)
        async with joined(joining, hello_of(claim), self._on_message) as link:
            self._link = link
            self._agent = Agent(self.config, link, self._hooks.progress, self._module)
            log.info("node %d has joined node 0 at %s", self.place.node, self._leader)
            try:
                return await self._stay(relay, link)
            finally:
                self._link = None
                await self._agent.end()

    async def _stay(self, relay: Relay, link: Link) -> int:
        """Until the link ends, or the server goes on without this node and its calls are over."""
        ended = asyncio.create_task(link.ended())
        released = asyncio.create_task(self._released.wait())
        try:
            await asyncio.wait((ended, released), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                log.info("the server goes on without this node: draining, at most %g s", self._drain_seconds)
                self.health.set(serving=False)
                self._drain()
                over = asyncio.create_task(relay.closed(self._drain_seconds))
                await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
            if not ended.done():
                self._ending = True
                relay.end("this node stops")
                return 0
            return self._ended(relay, ended.result())
        finally:
            ended.cancel()
            released.cancel()

    @property
    def _drain_seconds(self) -> float:
        return self.config.grpc.drain_seconds

    def _ended(self, relay: Relay, reason: str) -> int:
        """Interprets the end of the link. Returns: exit code."""
        self._ending = True
        self.health.set(serving=False)
        if self._end is None or self._end.code:
            self.health.fail()
        if self._end is None:
            message = f"node 0 at {self._leader} {reason}"
            log.error("%s; every stream ends, this node stops", message)
            relay.end(f"{message}: the server ends")
            return 1
        if self._end.code:
            what = "this node cannot take part" if self._end.refused else "the server has ended"
            log.error("%s: %s", what, self._end.reason)
        relay.refuse("the server has ended")  # final messages of streams may still be in transit
        return self._end.code

    def _on_message(self, message: pb.NodeMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "state":
            self._serve(message.state.serving)
            if message.state.serving and self._agent is not None:
                self._agent.on_serving()
        elif kind == "end":
            self._end = message.end
        elif kind == "released":
            self._released.set()
        elif self._agent is not None:
            self._agent.on_message(message)

    def _serve(self, serving: bool) -> None:
        was = self.health.serving
        self.health.set(serving=serving)
        if was and not serving and not self._released.is_set():  # it will not serve again
            self._drain()
        if serving and not was:
            nodes, node = self.place.nodes, self.place.node
            log.info("serving through node 0 on %s, node %d of %d", self.address, node, nodes)
            self._hooks.serving()
