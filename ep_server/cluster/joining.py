"""How a node comes to node 0: again and again until it is there, once if it is refused. Units: seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from ep_server.cluster.link import Link, liveness
from ep_server.errors import StartupError, Unavailable
from ep_server.v1 import nodes_pb2 as pb
from ep_server.v1 import nodes_pb2_grpc

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
SAY_EVERY = 10.0

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
    """address: of node 0, host:port. metadata: credentials of this node, asked for at every try."""

    address: str
    credentials: grpc.ChannelCredentials | None
    metadata: Callable[[], tuple[tuple[str, str], ...]]
    connect_seconds: float
    silent_seconds: float


@asynccontextmanager
async def joined(
    joining: Joining, hello: pb.Hello, on_message: Callable[[pb.NodeMessage], None]
) -> AsyncIterator[Link]:
    """The link to node 0 once that has taken this node; closed on exit.

    Raises: StartupError where node 0 refuses it, or cannot be reached for connect_seconds.
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
    began = said = loop.time()
    pause, why = FIRST_PAUSE, "it does not answer"
    while (left := began + joining.connect_seconds - loop.time()) > 0:
        link = Link(on_message, joining.silent_seconds)
        link.send(hello=hello)
        try:
            async with asyncio.timeout(left):
                return link, asyncio.create_task(link.read(await _taken(channel, joining, link)))
        except TimeoutError:
            pass
        except Unavailable as error:
            why = str(error)
        link.end("was not taken")
        if loop.time() - said >= SAY_EVERY:
            said = loop.time()
            log.info("node 0 at %s: %s; trying again", joining.address, why)
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)
    raise StartupError(f"node 0 at {joining.address} was not reached in {joining.connect_seconds:g} s: {why}")


async def _taken(channel: aio.Channel, joining: Joining, link: Link) -> AsyncIterator[pb.Bundle]:
    """Goes to node 0 once. As _first()."""
    call = nodes_pb2_grpc.NodesStub(channel).Join(link.outgoing(), metadata=joining.metadata())
    try:
        return await _first(call)
    except asyncio.CancelledError:
        call.cancel()
        raise


async def _first(call: Any) -> AsyncIterator[pb.Bundle]:
    """Waits until node 0 takes this node: it then sends a sign of life. Returns: all that comes.

    Raises: Unavailable where it is worth another try; StartupError.
    """
    try:
        first = await call.read()
    except aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise Unavailable(f"UNAVAILABLE: {error.details()}") from None
        raise StartupError(_refused(error)) from None
    if not isinstance(first, pb.Bundle):
        raise Unavailable("it has ended")
    return _bundles(call, first)


async def _bundles(call: Any, first: pb.Bundle) -> AsyncIterator[pb.Bundle]:
    """All that comes, the first one read already. Raises: aio.AioRpcError."""
    bundle = first
    while isinstance(bundle, pb.Bundle):  # else it is the end
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
