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
from ep_server.errors import EpServerError, QueueFull, Unavailable
from ep_server.frontend import control, health
from ep_server.frontend.call_metadata import NODE_KEY
from ep_server.frontend.control import public_names, refuse_control
from ep_server.frontend.endpoint import message_limit
from ep_server.frontend.health import Health
from ep_server.frontend.introspection import add_channelz, add_reflection, channelz_names
from ep_server.frontend.messages import CallLimits, Method
from ep_server.frontend.port import Port
from ep_server.frontend.service import GENERATE
from ep_server.frontend.unread import CallEnd, read_in_time
from ep_server.v1 import control_pb2, decode_pb2

log = logging.getLogger(__name__)

Pairs = Sequence[tuple[str, str | bytes]]
Request = bytes | AsyncIterator[bytes]  # a message, or a stream of them

SERVICES: tuple[Any, ...] = (
    decode_pb2.DESCRIPTOR.services_by_name["Decode"],
    control_pb2.DESCRIPTOR.services_by_name["Control"],
)
# Not forwarded: what gRPC sets itself, credentials for this node, and what callers may not claim.
_OWN = frozenset(("authorization", "content-type", "host", "te", "user-agent", NODE_KEY))
# The statuses of calls whose connection broke. Node 0 itself sends these only with a trailer.
_BROKEN = frozenset(grpc.StatusCode[name] for name in ("CANCELLED", "INTERNAL", "UNAVAILABLE", "UNKNOWN"))
_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """node: of this relay. leader: node 0's address, for messages. Others: as in GrpcConfig, of this node.

    max_streams: relayed at once. unread_seconds: how long a message may wait for its caller.
    """

    node: int
    leader: str
    max_streams: int
    unread_seconds: float


class RelayObserver(Protocol):
    """Receives events of relayed streams. Called in the event loop."""

    def on_relay_began(self) -> None:
        """A stream was accepted."""
        ...

    def on_relay_ended(self, status: str) -> None:
        """A stream ended with this gRPC status, by name."""
        ...

    def on_relay_refused(self, status: str) -> None:
        """A stream was refused here and never forwarded to node 0."""
        ...


class Relay:
    """Relays all public services to node 0. Use it in one event loop. The caller keeps the channel."""

    def __init__(
        self,
        channel: aio.Channel,
        settings: RelaySettings,
        observer: RelayObserver,
        credentials: Callable[[], Pairs] = tuple,
        doors: Iterable[Any] = (),
    ) -> None:
        """credentials: returns the metadata that authenticates this node; called for every call.

        doors: ServiceDescriptors of other protocols.
        """
        self.open_streams = 0
        self._channel: Any = channel  # for calls of raw bytes, which the stubs do not type
        self._settings = settings
        self._observer = observer
        self._credentials = credentials
        self._doors = tuple(doors)
        self._ended = ""
        self._calls: set[Any] = set()
        self._no_calls = asyncio.Event()
        self._no_calls.set()

    def call_limits(self, max_bytes: int) -> CallLimits:
        """Refuses streams before their messages are read, and counts them. max_bytes: of a message."""
        methods = {GENERATE: Method(max_bytes, self._check_room)}
        for service in self._doors:
            for method in service.methods:
                check_room = self._check_room if method.server_streaming else self._check
                methods[f"/{service.full_name}/{method.name}"] = Method(max_bytes, check_room)
        return CallLimits(methods, self._settings.max_streams, self._observer.on_relay_refused)

    def names(self, config: GrpcConfig) -> tuple[str, ...]:
        """Full names of the services of callers at the public port."""
        return (*public_names(config), *(service.full_name for service in self._doors))

    def add_to(self, server: aio.Server, names: Iterable[str]) -> None:
        """Adds all methods of the services with these full names."""
        for service in (service for service in (*SERVICES, *self._doors) if service.full_name in names):
            handlers = {method.name: self._handler(service.full_name, method) for method in service.methods}
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.full_name, handlers),)
            )

    def refuse(self, message: str) -> None:
        """Ends new calls with UNAVAILABLE and this message. Node 0 ends those in flight."""
        self._ended = self._ended or message

    def end(self, message: str) -> None:
        """Node 0 is lost: ends calls in flight and new ones with UNAVAILABLE and this message."""
        self.refuse(message)
        for call in list(self._calls):
            call.cancel()

    async def closed(self, seconds: float) -> None:
        """Waits until no call is in flight, at most this long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._no_calls.wait()

    def _handler(self, service: str, method: Any) -> Any:
        path, kind = f"/{service}/{method.name}", (method.client_streaming, method.server_streaming)
        # A decoder that changes nothing. The interceptor calls the decoder of every handler.
        if kind == (False, False):
            unary = self._relay_unary(self._channel.unary_unary(path))
            return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=bytes)
        if kind == (False, True):
            stream = self._relay_stream(self._channel.unary_stream(path))
            return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=bytes)
        if kind == (True, True):
            stream = self._relay_many(self._channel.stream_stream(path))
            return grpc.stream_stream_rpc_method_handler(stream, request_deserializer=bytes)
        raise NotImplementedError(f"{path} takes a stream of requests and gives one response")

    def _relay_unary(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        async def relayed(request: bytes, context: Any) -> bytes:
            async with self._passed_on(begin, request, context) as call:
                response: bytes = await call
                await _pass_initial(call, context)
            return response

        return relayed

    def _relay_stream(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        async def relayed(request: Request, context: Any) -> AsyncIterator[bytes]:
            end = CallEnd(context)
            status = self._count(context, end)
            messages = self._messages(begin, request, context, status)
            async for message in read_in_time(messages, self._settings.unread_seconds, end):
                yield message

        return relayed

    def _relay_many(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        relay = self._relay_stream(begin)

        async def relayed(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            sent = _Requests(requests)
            try:
                async for message in relay(sent.messages(), context):
                    yield message
            except asyncio.CancelledError:
                if sent.error is not None:
                    raise sent.error from None
                raise

        return relayed

    async def _messages(
        self, begin: Callable[..., Any], request: Request, context: Any, status: _Status
    ) -> AsyncIterator[bytes]:
        async with self._passed_on(begin, request, context, status) as call:
            await _pass_initial(call, context)
            async for message in call:
                yield message

    @asynccontextmanager
    async def _passed_on(
        self, begin: Callable[..., Any], request: Request, context: Any, status: _Status | None = None
    ) -> AsyncIterator[Any]:
        """Forwards the call of `context` to node 0. Both end with the same status."""
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
                raise  # the caller cancelled
            status.name = Unavailable.status
            raise Unavailable(self._ended) from None

    def _follow(self, call: Any, context: Any) -> None:
        """Ends the call to node 0 when the caller's call is over, however it ended."""
        self._calls.add(call)
        self._no_calls.clear()

        def over(_context: Any) -> None:
            call.cancel()  # no effect if it has ended
            self._calls.discard(call)
            if not self._calls:
                self._no_calls.set()

        context.add_done_callback(over)

    def _count(self, context: Any, end: CallEnd) -> _Status:
        """Counts a stream until it ends. Raises: QueueFull, Unavailable."""
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
        """Checks that one more stream may open. Raises: QueueFull, Unavailable."""
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
        """Why a call did not reach node 0, or node 0 refused this node; "" for any other status."""
        kind = dict(_trailers(error)).get("epserver-error")
        where = f"node 0 at {self._settings.leader}"
        if kind == "Unauthenticated":
            log.error("%s does not take cluster.token_file of node %d", where, self._settings.node)
            return f"{where} does not know this node"
        if kind is None and error.code() in _BROKEN:
            return self._ended or f"{where} cannot be reached: {error.details()}"
        return ""


class _Requests:
    """The caller's messages, on their way to node 0. gRPC cancels the call there if one cannot be read."""

    def __init__(self, requests: AsyncIterator[bytes]) -> None:
        self.error: EpServerError | None = None  # why they ended early
        self._requests = requests

    async def messages(self) -> AsyncIterator[bytes]:
        """Raises: MessageTooLarge, InvalidArgument."""
        try:
            async for request in self._requests:
                yield request
        except EpServerError as error:
            self.error = error
            raise


@dataclass(slots=True)
class _Status:
    """The final status of a call; CANCELLED if the caller disconnects."""

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
    """The public port of a follower, not open yet. It offers what node 0's does, through node 0.

    Raises: ConfigError (grpc.token_file).
    """
    port = Port(config, frozenset({health.SERVICE_NAME}), relay.call_limits(message_limit(config)))
    add_public(port.server, config, relay, status)
    return port


def add_public(server: aio.Server, config: GrpcConfig, relay: Relay, status: Health) -> None:
    """Adds the services that a follower offers."""
    names = relay.names(config)
    relay.add_to(server, names)
    if control.SERVICE_NAME in names:
        add_channelz(server, config)  # of this node
        names = (*names, *channelz_names(config))
    else:
        refuse_control(server, config)
    health.add_HealthServicer_to_server(status, server)
    add_reflection(server, config, (*names, health.SERVICE_NAME))
