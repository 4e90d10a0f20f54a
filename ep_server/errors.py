"""Every error the product raises, in one tree. Knows nothing of gRPC but the name of a status.

EpServerError
├── RequestError                 the caller can mend it
│   ├── InvalidArgument          INVALID_ARGUMENT     a field is out of range
│   ├── ContextLengthExceeded    OUT_OF_RANGE         prompt + max_new_tokens > context
│   ├── NotFound                 NOT_FOUND            unknown model or request id
│   ├── DuplicateRequest         ALREADY_EXISTS       the id is in flight
│   ├── QueueFull                RESOURCE_EXHAUSTED   try again after retry_after_ms
│   ├── MessageTooLarge          RESOURCE_EXHAUSTED   more bytes than grpc.max_message_bytes
│   ├── SlowReader           RESOURCE_EXHAUSTED   the reader of a stream does not keep up
│   ├── Unauthenticated          UNAUTHENTICATED      no or wrong bearer token
│   ├── SwitchedOff              UNIMPLEMENTED        the service is not served here
│   ├── RequestCancelled         CANCELLED            dropped stream or Abort
│   └── DeadlineExceeded         DEADLINE_EXCEEDED    the request's own deadline passed
├── Unavailable                  UNAVAILABLE          not now; another server may serve it
│   ├── Draining                                      shutting down, no new requests
│   └── RankLost                                      a rank process died
├── StartupError                 FAILED_PRECONDITION  the server cannot start
│   ├── ConfigError                                   field, value, what is allowed
│   └── CheckpointError                               file or tensor missing or of a wrong shape
├── ExchangeError                INTERNAL             dispatch / combine
│   ├── PeerTimeout                                   a wait passed its deadline
│   ├── PeerLost                                      a rank of another host is gone
│   ├── HookNotCalled                                 a bank came round before its receive hook ran
│   ├── ProtocolViolation                             a cell newer than expected
│   └── GroupAborted                                  an earlier error aborted the group
└── InternalError                INTERNAL             a bug of ours
"""

from __future__ import annotations

from typing import Any, ClassVar


class EpServerError(Exception):
    """Root of the tree. `status` is the gRPC status name that the interceptor answers with."""

    status: ClassVar[str] = "INTERNAL"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception would call the constructor with the message alone; some take more.
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(cls: type[EpServerError], args: tuple[Any, ...], attributes: dict[str, Any]) -> EpServerError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(attributes)
    return error


class RequestError(EpServerError):
    """The caller can mend it; the server is healthy."""

    status = "INVALID_ARGUMENT"


class FieldError(EpServerError):
    """Mixes field, value and allowed range into one message; base of the two that name a field."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__(f"{field} = {value!r}: must be {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class InvalidArgument(FieldError, RequestError):
    """A field of a request is out of its range."""

    status = "INVALID_ARGUMENT"


class ContextLengthExceeded(RequestError):
    """Prompt plus max_new_tokens does not fit the model's context."""

    status = "OUT_OF_RANGE"


class NotFound(RequestError):
    """No such model or request."""

    status = "NOT_FOUND"


class DuplicateRequest(RequestError):
    """A request with this id is in flight."""

    status = "ALREADY_EXISTS"


class QueueFull(RequestError):
    """The queue is at its limit; `retry_after_ms` goes out as grpc-retry-pushback-ms."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class MessageTooLarge(RequestError):
    """The message has more bytes than the server takes."""

    status = "RESOURCE_EXHAUSTED"


class SlowReader(RequestError):
    """More tokens wait for the reader of a stream than it may leave unread."""

    status = "RESOURCE_EXHAUSTED"


class Unauthenticated(RequestError):
    """The call carried no bearer token, or one the server does not know."""

    status = "UNAUTHENTICATED"


class SwitchedOff(RequestError):
    """The configuration of this server leaves the service out."""

    status = "UNIMPLEMENTED"


class RequestCancelled(RequestError):
    """The stream was dropped, or Abort named the request."""

    status = "CANCELLED"


class DeadlineExceeded(RequestError):
    """The deadline of the request passed before it finished."""

    status = "DEADLINE_EXCEEDED"


class Unavailable(EpServerError):
    """The server cannot serve now; another one may."""

    status = "UNAVAILABLE"


class Draining(Unavailable):
    """The server is shutting down and takes no new requests."""


class RankLost(Unavailable):
    """A rank process died; the server ends its streams and exits."""


class StartupError(EpServerError):
    """The server cannot start; the message says why in one line."""

    status = "FAILED_PRECONDITION"


class ConfigError(FieldError, StartupError):
    """A configuration field is out of its range."""

    status = "FAILED_PRECONDITION"


class CheckpointError(StartupError):
    """A checkpoint file or tensor is missing, broken or of an unexpected shape."""


class ExchangeError(EpServerError):
    """Dispatch or combine failed."""


class PeerTimeout(ExchangeError):
    """A wait for a peer passed its deadline.

    Attributes:
        op, phase: which wait, for example "dispatch", "recv_header".
        rank, peer: who waited for whom.
        expected, seen: epochs, the low 32 bits of the cell.
    """

    def __init__(self, op: str, phase: str, rank: int, peer: int, expected: int, seen: int) -> None:
        super().__init__(
            f"rank {rank} timed out in {op}/{phase} waiting for peer {peer}: "
            f"expected epoch {expected}, saw {seen}"
        )
        self.op, self.phase, self.rank, self.peer = op, phase, rank, peer
        self.expected, self.seen = expected, seen


class PeerLost(ExchangeError):
    """A rank of another host is gone: the network said so, or some rank timed out on it.

    Attributes:
        op, phase: where it was noticed. rank, peer: who noticed, and who is gone.
    """

    def __init__(self, op: str, phase: str, rank: int, peer: int) -> None:
        super().__init__(f"rank {rank} lost peer {peer} in {op}/{phase}")
        self.op, self.phase, self.rank, self.peer = op, phase, rank, peer


class HookNotCalled(ExchangeError):
    """A bank came round again before the receive hook of its last operation ran."""


class ProtocolViolation(ExchangeError):
    """A cell carries an epoch newer than the one waited for."""


class GroupAborted(ExchangeError):
    """An earlier error aborted the group; every wait returns at once until reset."""


class InternalError(EpServerError):
    """A bug of ours; the message says which invariant broke."""
