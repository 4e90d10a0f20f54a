"""Interceptors around every call: map errors to statuses, count calls, authenticate callers.

Handlers raise errors of errors.py and contain no `except`; each error class carries its status.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc import aio

from ep_server.errors import (
    ConfigError,
    Draining,
    EpServerError,
    FieldError,
    InternalError,
    QueueFull,
    Unauthenticated,
)

log = logging.getLogger(__name__)

Continuation = Callable[[Any], Awaitable[Any]]
Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]

# (request streams, response streams) -> attribute of a handler, constructor of one.
_KINDS: dict[tuple[bool, bool], tuple[str, Any]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class ErrorInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg, misc, unused-ignore]
    """Maps EpServerError to its status. Anything else is a bug: INTERNAL, with the traceback in the log."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Guards the handler; streams must be async generators."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method

        def guard_unary(behaviour: Unary) -> Unary:
            async def guarded(request: Any, context: Any) -> Any:
                try:
                    return await behaviour(request, context)
                except Exception as error:
                    await _abort(method, context, error)

            return guarded

        def guard_stream(behaviour: Stream) -> Stream:
            async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    async for response in behaviour(request, context):
                        yield response
                except Exception as error:
                    await _abort(method, context, error)

            return guarded

        return None if handler is None else _rebuild(handler, guard_unary, guard_stream)


class CallCounter(aio.ServerInterceptor):  # type: ignore[type-arg, misc, unused-ignore]
    """Counts open calls and, by status, those that end before they are admitted. Used in one event loop.

    After refuse(), all calls end with Draining.
    """

    def __init__(self, on_refused: Callable[[str], None] = lambda status: None) -> None:
        """on_refused: gets the gRPC status of each call that ended before entered()."""
        self.open_calls = 0
        self._on_refused = on_refused
        self._outside: set[Any] = set()  # contexts of open calls that are not admitted yet
        self._refuses = False
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._arrived = 0
        self._gate = asyncio.Event()
        self._gate.set()

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Counts the call from its start until its status was sent."""
        self._arrived += 1
        await self._gate.wait()
        handler = await continuation(handler_call_details)

        def counted(behaviour: Any) -> Any:
            def begun(request: Any, context: Any) -> Any:
                self._begin(context)
                return behaviour(request, context)

            return begun

        return None if handler is None else _rebuild(handler, counted, counted)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this context is open, new calls wait."""
        self._gate.clear()
        try:
            yield
        finally:
            self._gate.set()

    async def lull(self, seconds: float, tries: int) -> None:
        """Waits until no call arrived for that long: gRPC has then handed over all it had."""
        for _ in range(tries):
            before = self._arrived
            await asyncio.sleep(seconds)
            if self._arrived == before:
                return

    def entered(self, context: Any) -> None:
        """A call's handler got its message: from now on its service counts the call."""
        self._outside.discard(context)

    def refuse(self) -> None:
        """From now on calls end with Draining."""
        self._refuses = True

    async def ended(self, seconds: float) -> None:
        """Waits until no call is open, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none_open.wait()

    def _begin(self, context: Any) -> None:
        self.open_calls += 1
        self._outside.add(context)
        self._none_open.clear()
        context.add_done_callback(self._end)
        if self._refuses:
            raise Draining("the server is shutting down")

    def _end(self, context: Any) -> None:
        self.open_calls -= 1
        if not self.open_calls:
            self._none_open.set()
        if context in self._outside:
            self._outside.remove(context)
            self._on_refused(_status(context))


class AuthInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg, misc, unused-ignore]
    """Requires "authorization: Bearer <token>" on every call, except to `open_services`."""

    def __init__(self, tokens: TokenFile, open_services: frozenset[str]) -> None:
        self._tokens = tokens
        self._open_services = open_services

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Returns a handler that proceeds or raises Unauthenticated."""
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.lstrip("/").partition("/")[0]
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get("authorization")
        if handler is None or service in self._open_services or self._tokens.accepts(given):
            return handler
        missing = "no bearer token" if given is None else "unknown bearer token"
        error = Unauthenticated(f"{missing}: send metadata 'authorization: Bearer <token>'")

        async def refuse_unary(_request: Any, _context: Any) -> NoReturn:
            raise error

        async def refuse_stream(_request: Any, _context: Any) -> AsyncIterator[Any]:
            raise error
            yield  # makes it a generator

        return _rebuild(handler, lambda _: refuse_unary, lambda _: refuse_stream)


class TokenFile:
    """Accepted bearer tokens, one per line; blank lines and lines that begin with # are skipped.

    Read again whenever it changes. While it holds no token or cannot be read, none is accepted. Tokens are
    compared by digest, all of them, in constant time.
    """

    def __init__(self, path: str) -> None:
        """Raises: ConfigError for a file that cannot be read or holds no token."""
        self._path = Path(path)
        self._stamp: tuple[int, int, int] | None = None  # None if the last read failed
        self._digests: list[bytes] = []
        self._fault = ""
        if not self._look():
            raise ConfigError(
                "grpc.token_file", path, f"a readable file with at least one token ({self._fault})"
            )

    def accepts(self, header: str | bytes | None) -> bool:
        """Whether an authorization header holds one of the tokens."""
        before = self._fault
        if not self._look() and self._fault != before:
            log.error("token file %s: %s; every call that needs a token is refused", self._path, self._fault)
        elif before and not self._fault:
            log.info("token file %s is readable again: its tokens are accepted", self._path)
        text = header.decode("utf-8", "replace") if isinstance(header, bytes) else header or ""
        scheme, _, token = text.partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)

    def _look(self) -> bool:
        """Reads the file if it changed. Returns: whether it holds a token."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp != self._stamp:
                self._stamp, self._digests, self._fault = None, [], ""
                tokens = tokens_in(self._path.read_text(encoding="utf-8"))
                self._stamp = stamp
                self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
                self._fault = "" if tokens else "it holds no token"
        except OSError as error:
            self._stamp, self._digests = None, []
            self._fault = (error.strerror or str(error)).lower()
        except UnicodeDecodeError:
            self._fault = "it is not UTF-8 text"
        return not self._fault


def tokens_in(text: str) -> list[str]:
    """Tokens of a file in order, without blank lines and lines that begin with #."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _rebuild(
    handler: Any,
    unary: Callable[[Unary], Unary],
    stream: Callable[[Stream], Stream],
) -> Any:
    """The handler with its behaviour wrapped."""
    name, construct = _KINDS[handler.request_streaming, handler.response_streaming]
    wrap: Any = stream if handler.response_streaming else unary
    behaviour = wrap(getattr(handler, name))
    return construct(behaviour, handler.request_deserializer, handler.response_serializer)


def _status(context: Any) -> str:
    """Status of a call that was refused; gRPC itself ends calls whose callers left."""
    code = context.code()
    if code is not None:
        return str(code.name)
    return "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"


def _header(text: str) -> str:
    """Text as metadata can hold it: gRPC ends calls with INTERNAL for other characters."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def _drop_frames(error: BaseException | None) -> None:
    """Frees what an error's frames hold, such as messages: gRPC keeps errors in reference cycles."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


async def _abort(method: str, context: Any, error: Exception) -> NoReturn:
    """Ends the call with the status of `error`. Trailers: epserver-error, epserver-field, retry pushback."""
    if isinstance(error, aio.AbortError):
        raise error
    known = (
        error if isinstance(error, EpServerError) else InternalError("internal error, see the server's log")
    )
    trailers = [("epserver-error", type(known).__name__)]
    if isinstance(known, FieldError):
        trailers.append(("epserver-field", _header(known.field)))
    if isinstance(known, QueueFull):
        trailers.append(("grpc-retry-pushback-ms", str(known.retry_after_ms)))
    if known.status == "INTERNAL":
        log.error("%s failed", method, exc_info=error)
    else:
        log.debug("%s: %s: %s", method, known.status, known)
    _drop_frames(error)
    try:
        await context.abort(grpc.StatusCode[known.status], str(known), tuple(trailers))
    except aio.InternalError:  # the call has just ended: gRPC would only log a fault
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")
