"""What a call's failure means: the server's error, and whether to try again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from ep_server import errors
from ep_server.errors import EpServerError

# The error of a status that comes without a name: from a proxy, or from gRPC itself.
_OF_STATUS: dict[str, type[EpServerError]] = {
    each.status: each
    for each in (
        errors.ContextLengthExceeded,
        errors.NotFound,
        errors.DuplicateRequest,
        errors.Unauthenticated,
        errors.SwitchedOff,
        errors.RequestCancelled,
        errors.DeadlineExceeded,
        errors.Unavailable,
    )
}
_REQUEST_STATUSES = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
UNBOUNDED = float("inf")


def error_of(failure: grpc.RpcError) -> EpServerError:
    """The error of errors.py that the server raised, with `field` and `retry_after_ms` where it sent them."""
    if not isinstance(failure, (grpc.Call, grpc.aio.AioRpcError)):
        return EpServerError(str(failure))
    status, message = failure.code().name, failure.details() or ""
    pairs: Any = failure.trailing_metadata() or ()
    trailers: dict[str, Any] = dict(pairs)
    named = getattr(errors, str(trailers.get("epserver-error", "")), None)
    if not (isinstance(named, type) and issubclass(named, EpServerError)):
        named = _OF_STATUS.get(status, EpServerError)
        if status in _REQUEST_STATUSES:
            named = errors.RequestError
    given: dict[str, Any] = {}
    if issubclass(named, errors.FieldError):
        given = {"field": str(trailers.get("epserver-field", "")), "value": None, "allowed": ""}
    if issubclass(named, errors.QueueFull):
        given = {"retry_after_ms": _pushback_ms(trailers)}
    return errors.received(named, message, **given)


def _pushback_ms(trailers: dict[str, Any]) -> int:
    """-1: do not retry."""
    try:
        return int(trailers.get("grpc-retry-pushback-ms", -1))
    except ValueError:
        return -1


@dataclass(frozen=True, slots=True)
class Retries:
    """When a call is sent again: before its first event, and only if that is safe.

    That is: the server is unavailable, or its queue is full and it says when to come back.

    attempts: in all; 1 = no retries.
    first_wait_seconds: doubles with every attempt. The wait is drawn from its upper half, so that many
        clients do not return at once.
    """

    attempts: int = 4
    first_wait_seconds: float = 0.25
    max_wait_seconds: float = 8.0
    draw: Callable[[], float] = field(default=random.random, repr=False)  # 0 to 1

    def wait(self, error: EpServerError, attempt: int) -> float | None:
        """Seconds to wait after a failed attempt, counted from 1; None: do not try again."""
        if attempt >= self.attempts:
            return None
        if isinstance(error, errors.QueueFull):
            milliseconds: int = error.retry_after_ms
            return milliseconds / 1000 if milliseconds >= 0 else None
        if isinstance(error, errors.Unavailable):
            longest: float = min(self.first_wait_seconds * 2 ** (attempt - 1), self.max_wait_seconds)
            return longest * (0.5 + 0.5 * self.draw())
        return None


NO_RETRIES = Retries(attempts=1)


class Attempts:
    """The attempts of one call, within its deadline."""

    def __init__(self, retries: Retries, timeout: float | None, deadline_ms: int | None) -> None:
        """timeout: seconds, of the call. deadline_ms: of the request."""
        limits = [UNBOUNDED if timeout is None else timeout]
        limits += [] if deadline_ms is None else [deadline_ms / 1000]
        self._retries = retries
        self._timeout = timeout
        self._end = time.monotonic() + min(limits)
        self._count = 0

    def begin(self) -> float | None:
        """Starts an attempt. Returns: its timeout."""
        self._count += 1
        if self._count == 1:
            return self._timeout
        left = self._end - time.monotonic()
        return None if left == UNBOUNDED else max(left, 0.001)

    def wait(self, error: EpServerError) -> float | None:
        """Seconds until the next attempt; None: there is none, or it would come too late."""
        seconds = self._retries.wait(error, self._count)
        late = seconds is None or time.monotonic() + seconds >= self._end
        return None if late else seconds
