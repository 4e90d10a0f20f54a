"""[1] The public port of a follower: calls are forwarded to node 0 as bytes, undecoded.

A call keeps its deadline, metadata, status and trailers, and either end may cancel it. The relay forwards a
message once the caller's transport has taken the previous one, so a slow reader slows only its own call.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
from grpc import aio

from ep_server.config import GrpcConfig
from ep_server.errors import QueueFull, Unavailable
from ep_server.frontend import control, health
from ep_server.frontend.call_metadata import NODE_KEY
from ep_server.frontend.control import public_names, refuse_control
from ep_server.frontend.endpoint import add_reflection, message_limit
from ep_server.frontend.health import Health
from ep_server.frontend.messages import Door, Method
from ep_server.frontend.port import Port
from ep_server.frontend.service import GENERATE
from ep_server.frontend.unread import CallEnd, read_in_time
from ep_server.v1 import control_pb2, decode_pb2

log = logging.getLogger(__name__)

Pairs = Sequence[tuple[str, str | bytes]]

SERVICES: tuple[Any, ...] = (
    decode_pb2.DESCRIPTOR.services_by_name["Decode"],
    control_pb2.DESCRIPTOR.services_by_name["Control"],
)
# Of this hop alone: what gRPC sets by itself, who the caller is to this node, and what no caller may claim.
_OWN = frozenset(("authorization", "content-type", "host", "te", "user-agent", NODE_KEY))
# How a connection that breaks ends its calls; node 0 itself says these only with a trailer.
_BROKEN = frozenset(grpc.StatusCode[name] for name in ("CANCELLED", "INTERNAL", "UNAVAILABLE", "UNKNOWN"))
_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """node: of this relay. leader: node 0's address, for messages. Others: as in GrpcConfig, of this node.

    max_streams: relayed at once. unread_seconds: that a message may wait for its caller.
    """

    node: int
    leader: str
    max_streams: int
    unread_seconds: float


class RelayObserver(Protocol):
    """Hears of relayed streams. Called in the event loop."""

    def on_relay_began(self) -> None:
        """A stream was taken."""
        ...

    def on_relay_ended(self, status: str) -> None:
        """It is over, with the name of this gRPC status."""
        ...

    def on_relay_refused(self, status: str) -> None:
        """A stream was refused here, node 0 has not heard of it."""
        ...


class Relay:
    """Decode and Control by way of node 0. Use it inside one event loop; the channel stays the caller's."""

    def __init__(
        self,
        channel: aio.Channel,
        settings: RelaySettings,
        observer: RelayObserver,
        credentials: Callable[[], Pairs] = tuple,
    ) -> None:
        """credentials: metadata that node 0 wants to see of a node, asked for at every call."""
        self.open_streams = 0
        self._channel: Any = channel  # calls of bytes, which the stubs do not know
        self._settings = settings
        self._observer = observer
        self._credentials = credentials
        self._ended = ""
        self._calls: set[Any] = set()
        self._no_calls = asyncio.Event()
        self._no_calls.set()

    def door(self, max_bytes: int) -> Door:
        """Refuses streams before their messages are read, and counts them. max_bytes: of a message."""
        methods = {GENERATE: Method(max_bytes, self._check_room)}
        return Door(methods, self._settings.max_streams, self._observer.on_relay_refused)

    def add_to(self, server: aio.Server, names: Iterable[str]) -> None:
        """Adds those of SERVICES with these full names, every method of them."""
        for service in (service for service in SERVICES if service.full_name in names):
            handlers = {method.name: self._handler(service.full_name, method) for method in service.methods}
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.full_name, handlers),)
            )

    def refuse(self, message: str) -> None:
        """New calls end with UNAVAILABLE and this message; node 0 ends those in flight."""
        self._ended = self._ended or message

    def end(self, message: str) -> None:
        """Node 0 is lost: calls in flight and new ones end with UNAVAILABLE and this message."""
        self.refuse(message)
        for call in list(self._calls):
            call.cancel()

    async def closed(self, seconds: float) -> None:
        """Waits until no call is in flight, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._no_calls.wait()

    def _handler(self, service: str, method: Any) -> Any:
        if method.client_streaming:
            raise NotImplementedError(f"{service}/{method.name} takes a stream of requests")
        path = f"/{service}/{method.name}"
        # A decoder that changes nothing: the interceptor calls the one of every handler.
        if not method.server_streaming:
            unary = self._relay_unary(self._channel.unary_unary(path))
            return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=bytes)
        stream = self._relay_stream(self._channel.unary_stream(path))
        return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=bytes)

    def _relay_unary(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        async def relayed(request: bytes, context: Any) -> bytes:
            async with self._passed_on(begin, request, context) as call:
                response: bytes = await call
                await _pass_initial(call, context)
            return response

        return relayed

    def _relay_stream(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        async def relayed(request: bytes, context: Any) -> AsyncIterator[bytes]:
            end = CallEnd(context)
            status = self._count(context, end)
            messages = self._messages(begin, request, context, status)
            async for message in read_in_time(messages, self._settings.unread_seconds, end):
                yield message

        return relayed

    async def _messages(
        self, begin: Callable[..., Any], request: bytes, context: Any, status: _Status
    ) -> AsyncIterator[bytes]:
        async with self._passed_on(begin, request, context, status) as call:
            await _pass_initial(call, context)
            async for message in call:
                yield message

    @asynccontextmanager
    async def _passed_on(
        self, begin: Callable[..., Any], request: bytes, context: Any, status: _Status | None = None
    ) -> AsyncIterator[Any]:
        """A call of node 0 for the one of `context`, which ends as the other does."""
        status = status or _Status()
        try:
            self._check()
            metadata = self._metadata(context)
        except Unavailable as error:
            status.name = error.status
            raise
        call = begin(request, timeout=context.time_remaining(), metadata=metadata)
        self._follow(call, context)
        try:
            yield call
            context.set_trailing_metadata(await call.trailing_metadata())
            status.name = "OK"
        except aio.AioRpcError as error:
            broken = self._broken(error)
            status.name = Unavailable.status if broken else error.code().name
            if broken:
                raise Unavailable(broken) from None
            await _end_as(context, error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._ended or (task is not None and task.cancelling()):
                raise  # it was the caller
            status.name = Unavailable.status
            raise Unavailable(self._ended) from None

    def _follow(self, call: Any, context: Any) -> None:
        """The call of node 0 ends when the caller's is over, in whatever way."""
        self._calls.add(call)
        self._no_calls.clear()

        def over(_context: Any) -> None:
            call.cancel()  # nothing where it has ended
            self._calls.discard(call)
            if not self._calls:
                self._no_calls.set()

        context.add_done_callback(over)

    def _count(self, context: Any, end: CallEnd) -> _Status:
        """Counts a stream until it is over. Raises: QueueFull, Unavailable."""
        try:
            self._check_room()
        except (QueueFull, Unavailable) as error:
            self._observer.on_relay_refused(error.status)
            raise
        status = _Status()
        self.open_streams += 1
        self._observer.on_relay_began()

        def over(_context: Any) -> None:
            self.open_streams -= 1
            self._observer.on_relay_ended(end.error.status if end.error else status.name)

        context.add_done_callback(over)
        return status

    def _check_room(self) -> None:
        """Raises: QueueFull, Unavailable."""
        self._check()
        limit = self._settings.max_streams
        if self.open_streams >= limit:
            full = f"{self.open_streams} streams, the limit of this node is grpc.max_streams = {limit}"
            raise QueueFull(full, round(_RETRY_MS * (1 + random.random())))

    def _check(self) -> None:
        if self._ended:
            raise Unavailable(self._ended)

    def _metadata(self, context: Any) -> Pairs:
        given: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        kept = [(key, value) for key, value in given if key not in _OWN and not key.startswith("grpc-")]
        return [*kept, (NODE_KEY, str(self._settings.node)), *self._credentials()]

    def _broken(self, error: aio.AioRpcError) -> str:
        """Why a call did not reach node 0, or this node was refused; "" if its status is the caller's."""
        kind = dict(_trailers(error)).get("epserver-error")
        where = f"node 0 at {self._settings.leader}"
        if kind == "Unauthenticated":
            log.error("%s does not take cluster.token_file of node %d", where, self._settings.node)
            return f"{where} does not know this node"
        if kind is None and error.code() in _BROKEN:
            return self._ended or f"{where} cannot be reached: {error.details()}"
        return ""


@dataclass(slots=True)
class _Status:
    """How a call ended; a caller that leaves says nothing."""

    name: str = "CANCELLED"


def _trailers(error: aio.AioRpcError) -> Pairs:
    last: Any = error.trailing_metadata() or ()
    return tuple((key, value) for key, value in last)


async def _end_as(context: Any, error: aio.AioRpcError) -> NoReturn:
    """Ends a call as node 0 did."""
    await context.abort(error.code(), error.details() or "", _trailers(error))
    raise AssertionError("abort returned")


async def _pass_initial(call: Any, context: Any) -> None:
    initial = await call.initial_metadata()
    if initial:
        await context.send_initial_metadata(tuple(initial))


_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),  # the caller decides
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, beside the link's
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> aio.Channel:
    """A channel to node 0's host:port for relayed calls; it connects with the first one."""
    if credentials is None:
        return aio.insecure_channel(address, options=_OPTIONS)
    return aio.secure_channel(address, credentials, options=_OPTIONS)


def relay_port(config: GrpcConfig, relay: Relay, status: Health) -> Port:
    """The public port of a node that does not lead, not open yet: as node 0's, but by way of it.

    Raises: ConfigError (grpc.token_file).
    """
    port = Port(config, frozenset({health.SERVICE_NAME}), relay.door(message_limit(config)))
    add_public(port.server, config, relay, status)
    return port


def add_public(server: aio.Server, config: GrpcConfig, relay: Relay, status: Health) -> None:
    """Adds what callers may ask of such a node."""
    names = public_names(config)
    relay.add_to(server, names)
    if control.SERVICE_NAME not in names:
        refuse_control(server, config)
    health.add_HealthServicer_to_server(status, server)
    add_reflection(server, config, (*names, health.SERVICE_NAME))
