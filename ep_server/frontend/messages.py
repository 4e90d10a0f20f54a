"""The one message of a call: read and decoded only after the call was let in. Knows no service.

gRPC would read and decode the message before it calls a handler, so callers without a token could make the
server decode. Here the handler starts on metadata alone. What nobody reads stays with its caller, except
for one HTTP/2 window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from ep_server.errors import DeadlineExceeded, InvalidArgument, MessageTooLarge, QueueFull

Decoder = Callable[[bytes], Any]

SHORT_BYTES = 1 << 16  # a message that is no longer is decoded without a look at its fields
PLAIN_BYTES = 1 << 18  # largest message of a method that the owner of the port says nothing about
ARRIVAL_SECONDS = 60.0  # for a message to arrive, from the first step of its call
CANCEL_SECONDS = 0.1  # for gRPC to report that a call without a message is over
RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Method:
    """A method that takes messages of up to max_bytes.

    check_room: raises to refuse a call before its message is read.
    check: gets a long message before it is decoded; raises to refuse it.
    """

    max_bytes: int
    check_room: Callable[[], None]
    check: Callable[[bytes], None] = lambda data: None


@dataclass(frozen=True, slots=True)
class Door:
    """What the owner of a port knows about the calls to it.

    methods: by "/service/method". max_arriving: calls of one method whose message has not arrived yet.
    on_refused: gets the gRPC status of every call that ends before its handler has its message.
    measured: "/service/method" whose calls' wait to be accepted is measured, "" = none.
    on_accept_wait: gets such times, seconds.
    """

    methods: Mapping[str, Method] = field(default_factory=dict)
    max_arriving: int = 1024
    on_refused: Callable[[str], None] = lambda status: None
    measured: str = ""
    on_accept_wait: Callable[[float], None] = lambda seconds: None


_PLAIN = Method(PLAIN_BYTES, lambda: None)


class MessageReader(aio.ServerInterceptor):  # type: ignore[type-arg, misc, unused-ignore]
    """Add it last: the interceptors before it decide without the message."""

    def __init__(self, door: Door, on_read: Callable[[Any], None]) -> None:
        """on_read: gets the context of each call that is let in and has its message."""
        self._door = door
        self._on_read = on_read
        self._arriving: dict[str, deque[asyncio.Timeout]] = {}  # of calls without a message, oldest first
        self._long = asyncio.Lock()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Makes a handler of one request one of a stream, which gRPC starts without a message."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.request_streaming:
            return self._of_many(handler)
        path: str = handler_call_details.method
        method = self._door.methods.get(path, _PLAIN)
        arriving = self._arriving.setdefault(path, deque())

        async def unary(_messages: Any, context: Any) -> Any:
            message = await self._message(handler, method, arriving, context)
            return await handler.unary_unary(message, context)

        async def stream(_messages: Any, context: Any) -> AsyncIterator[Any]:
            message = await self._message(handler, method, arriving, context)
            async for response in handler.unary_stream(message, context):
                yield response

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(unary, None, handler.response_serializer)

    def _of_many(self, handler: Any) -> Any:
        """A handler that reads a stream of messages by itself."""

        def decode(data: bytes) -> Any:
            return _decoded(handler.request_deserializer, data)

        async def unary(messages: Any, context: Any) -> Any:
            self._on_read(context)
            return await handler.stream_unary(messages, context)

        async def stream(messages: Any, context: Any) -> AsyncIterator[Any]:
            self._on_read(context)
            async for response in handler.stream_stream(messages, context):
                yield response

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, decode, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(unary, decode, handler.response_serializer)

    async def _message(
        self, handler: Any, method: Method, arriving: deque[asyncio.Timeout], context: Any
    ) -> Any:
        """Raises: what `method` raises, QueueFull, DeadlineExceeded, MessageTooLarge, InvalidArgument."""
        method.check_room()
        data = await self._arrived(arriving, context)
        if len(data) > method.max_bytes:
            raise MessageTooLarge(f"message of {len(data)} bytes: at most {method.max_bytes}")
        if len(data) <= SHORT_BYTES:
            message = _decoded(handler.request_deserializer, data)
        else:
            async with self._long:  # other work of the event loop comes between two of them
                method.check(data)
                message = _decoded(handler.request_deserializer, data)
        self._on_read(context)
        return message

    async def _arrived(self, arriving: deque[asyncio.Timeout], context: Any) -> bytes:
        """The bytes of the message. Raises: QueueFull, DeadlineExceeded, InvalidArgument without one.

        One call too many ends the oldest: a new one most likely has its message, so callers who send none
        do not keep others out. Callers without a token may reach some methods, so each has its own limit.
        """
        most = self._door.max_arriving
        if len(arriving) >= most:
            arriving.popleft().reschedule(0)
        own = asyncio.timeout(ARRIVAL_SECONDS)
        try:
            async with own:
                arriving.append(own)
                data = await context.read()
        except TimeoutError:
            if own in arriving:
                raise DeadlineExceeded(f"no message arrived within {ARRIVAL_SECONDS:g} s") from None
            full = f"{most} newer calls wait for their message, the limit is grpc.max_streams = {most}"
            raise QueueFull(full, RETRY_MS) from None
        finally:
            with suppress(ValueError):
                arriving.remove(own)
        if data is aio.EOF:  # type: ignore[attr-defined, unused-ignore]
            await asyncio.sleep(CANCEL_SECONDS)  # a call that is over ends here
            raise InvalidArgument("request", "no message", "one message of the method's type")
        received: bytes = data
        return received


def _decoded(decode: Decoder, data: bytes) -> Any:
    """Raises: InvalidArgument."""
    try:
        return decode(data)
    except DecodeError:
        raise InvalidArgument("request", f"{len(data)} bytes", "a message of the method's type") from None
