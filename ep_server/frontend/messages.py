"""Reads the one message of a call, after the call was let in and within limits.

gRPC would read and decode the message before it calls a handler, so callers without a token could make the
server decode. Here the handler starts on metadata alone. An unread message stays with its caller, except
for one HTTP/2 window.

Elements are counted in the raw bytes before decoding: decoding two bytes per element costs up to a hundred
times their size and holds the interpreter meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from ep_server.errors import DeadlineExceeded, InvalidArgument, MessageTooLarge, QueueFull

MAX_FIELDS = 1 << 14  # written one by one; a packed list is one
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CONTINUED = bytes(range(128, 256))  # bytes of a varint that are not its last


def field_counts(data: bytes, descriptor: Any, most: Mapping[str, int]) -> Counter[str]:
    """Counts the elements of each repeated field by dotted name; stops at the first with too many.

    Args:
        descriptor: of the message. Its repeated numbers must be varints.
        most: elements that a field may have, by its dotted name; absent = any number.
    Raises: InvalidArgument for bytes that are no message, or of more than MAX_FIELDS fields.
    """
    walk = _Walk(data, most)
    with suppress(_Enough):
        walk.message(0, len(data), descriptor, "")
    return walk.found


class _Enough(Exception):
    """A field has too many elements: the rest of the message does not matter."""


class _Walk:
    def __init__(self, data: bytes, most: Mapping[str, int]) -> None:
        self.found: Counter[str] = Counter()
        self._data = data
        self._most = most
        self._fields = 0

    def message(self, at: int, end: int, descriptor: Any, prefix: str) -> None:
        """Counts the fields in a part of the data. Raises: _Enough once there are too many."""
        while at < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                allowed = f"at most {MAX_FIELDS}, with repeated numbers packed"
                raise InvalidArgument("request", f"more than {MAX_FIELDS} fields", allowed)
            tag, at = self._varint(at, end)
            start, at = self._value(tag & 7, at, end)
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is not None:
                self._count(field, tag & 7, start, at, prefix)

    def _count(self, field: Any, kind: int, start: int, end: int, prefix: str) -> None:
        name = prefix + field.name
        packed = kind == _BYTES and field.is_packed
        if field.is_repeated:
            self.found[name] += len(self._data[start:end].translate(None, _CONTINUED)) if packed else 1
            if self.found[name] > self._most.get(name, len(self._data)):
                raise _Enough
        if kind == _BYTES and field.message_type is not None:
            self.message(start, end, field.message_type, f"{name}.")

    def _value(self, kind: int, at: int, end: int) -> tuple[int, int]:
        """Returns where the value of a field begins and ends."""
        if kind == _VARINT:
            _, after = self._varint(at, end)
        elif kind == _BYTES:
            size, at = self._varint(at, end)
            after = at + size
        elif kind in (_FIXED32, _FIXED64):
            after = at + (4 if kind == _FIXED32 else 8)
        else:
            raise self._broken()
        if after > end:
            raise self._broken()
        return at, after

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """Reads a varint. Returns its value and where it ends."""
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                break
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise self._broken()

    def _broken(self) -> InvalidArgument:
        return InvalidArgument("request", f"{len(self._data)} bytes", "a message of the method's type")


Decoder = Callable[[bytes], Any]

SHORT_BYTES = 1 << 16  # a message up to this size is decoded without counting its fields
PLAIN_BYTES = 1 << 18  # largest message of a method without its own limit
ARRIVAL_SECONDS = 60.0  # for a message to arrive, from the first step of its call
CANCEL_SECONDS = 0.1  # for gRPC to report the end of a call without a message
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
class CallLimits:
    """Limits and callbacks for the calls of one port.

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
    """Interceptor that reads the message. Add it last: those before it decide without it."""

    def __init__(self, limits: CallLimits, on_read: Callable[[Any], None]) -> None:
        """on_read: gets the context of each call that is let in and has its message."""
        self._limits = limits
        self._on_read = on_read
        self._arriving: dict[str, deque[asyncio.Timeout]] = {}  # of calls without a message, oldest first
        self._long = asyncio.Lock()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Turns a unary handler into a streaming one, which gRPC starts without a message."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        path: str = handler_call_details.method
        method = self._limits.methods.get(path, _PLAIN)
        if handler.request_streaming:
            return self._of_many(handler, method)
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

    def _of_many(self, handler: Any, method: Method) -> Any:
        """A handler that reads the stream of messages itself, each within the limits of `method`."""

        async def decoded(messages: Any) -> AsyncIterator[Any]:
            async for data in messages:
                yield await self._decode(handler, method, data)

        async def unary(messages: Any, context: Any) -> Any:
            method.check_room()
            self._on_read(context)
            return await handler.stream_unary(decoded(messages), context)

        async def stream(messages: Any, context: Any) -> AsyncIterator[Any]:
            method.check_room()
            self._on_read(context)
            async for response in handler.stream_stream(decoded(messages), context):
                yield response

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(unary, None, handler.response_serializer)

    async def _message(
        self, handler: Any, method: Method, arriving: deque[asyncio.Timeout], context: Any
    ) -> Any:
        """Raises: what `method` raises, QueueFull, DeadlineExceeded, MessageTooLarge, InvalidArgument."""
        method.check_room()
        message = await self._decode(handler, method, await self._arrived(arriving, context))
        self._on_read(context)
        return message

    async def _decode(self, handler: Any, method: Method, data: bytes) -> Any:
        """Raises: what `method` raises, MessageTooLarge, InvalidArgument."""
        if len(data) > method.max_bytes:
            raise MessageTooLarge(f"message of {len(data)} bytes: at most {method.max_bytes}")
        if len(data) <= SHORT_BYTES:
            return _decoded(handler.request_deserializer, data)
        async with self._long:  # the event loop does other work between two of them
            method.check(data)
            return _decoded(handler.request_deserializer, data)

    async def _arrived(self, arriving: deque[asyncio.Timeout], context: Any) -> bytes:
        """The bytes of the message. Raises: QueueFull, DeadlineExceeded, InvalidArgument without one.

        Above the limit the oldest call is ended: newer ones most likely send their message, so callers that
        send none cannot block others. Callers without a token may reach some methods: each has its limit.
        """
        most = self._limits.max_arriving
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
