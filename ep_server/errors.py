"""Every error of the server, in one tree. It does not import gRPC: a status is its name.

EpServerError
├── RequestError                 the caller can fix it
│   ├── InvalidArgument          INVALID_ARGUMENT     a field is out of range
│   ├── ContextLengthExceeded    OUT_OF_RANGE         prompt + max_new_tokens > context
│   ├── NotFound                 NOT_FOUND            unknown model or request id
│   ├── DuplicateRequest         ALREADY_EXISTS       a request with this id is running
│   ├── QueueFull                RESOURCE_EXHAUSTED   try again after retry_after_ms
│   ├── MessageTooLarge          RESOURCE_EXHAUSTED   more bytes than grpc.max_message_bytes
│   ├── SlowReader               RESOURCE_EXHAUSTED   the caller reads too slowly
│   ├── Unauthenticated          UNAUTHENTICATED      no or wrong bearer token
│   ├── GrammarUnfollowed        INVALID_ARGUMENT     the grammar leaves no token, or is too complex
│   ├── SwitchedOff              UNIMPLEMENTED        the service is not served here
│   ├── Unsupported              UNIMPLEMENTED        a call of another protocol that has no counterpart here
│   ├── WrongState               FAILED_PRECONDITION  not in this state of the server: nothing to stop
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
│   ├── PeerLost                                      a rank ended, or was lost by another host
│   ├── HookNotCalled                                 a bank is needed again before its receive hook ran
│   ├── ProtocolViolation                             a cell newer than expected
│   └── GroupAborted                                  an earlier error aborted the group
└── InternalError                INTERNAL             a bug in the server
"""

from __future__ import annotations

from typing import Any, ClassVar


class EpServerError(Exception):
    """The root of the tree. `status` is the name of the gRPC status that the caller gets."""

    status: ClassVar[str] = "INTERNAL"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception would call the constructor with the message alone; some take more.
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(cls: type[EpServerError], args: tuple[Any, ...], attributes: dict[str, Any]) -> EpServerError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(attributes)
    return error


def received(cls: type[EpServerError], message: str, **attributes: Any) -> EpServerError:
    """An error that another process raised. attributes: what it told about it."""
    return _unpickled(cls, (message,), attributes)


class RequestError(EpServerError):
    """The caller can fix it. The server is healthy."""

    status = "INVALID_ARGUMENT"


class FieldError(EpServerError):
    """Puts field, value and allowed range into one message. The base of the two errors that name a field."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__()
        self.value, self.allowed = value, allowed
        self.rename(field)

    def rename(self, field: str) -> None:
        """Names the field as another protocol does."""
        self.field = field
        self.args = (f"{field} = {self.value!r}: must be {self.allowed}",)


class InvalidArgument(FieldError, RequestError):
    """A field of a request is out of its range."""

    status = "INVALID_ARGUMENT"


class ContextLengthExceeded(RequestError):
    """The prompt plus max_new_tokens does not fit the context."""

    status = "OUT_OF_RANGE"


class NotFound(RequestError):
    """The model or request is unknown."""

    status = "NOT_FOUND"


class DuplicateRequest(RequestError):
    """A request with this id is running."""

    status = "ALREADY_EXISTS"


class QueueFull(RequestError):
    """The queue is full. The trailer grpc-retry-pushback-ms says when to retry."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class MessageTooLarge(RequestError):
    """The message has more bytes than grpc.max_message_bytes."""

    status = "RESOURCE_EXHAUSTED"


class SlowReader(RequestError):
    """The caller reads its stream too slowly (grpc.stream_buffer, grpc.unread_seconds)."""

    status = "RESOURCE_EXHAUSTED"


class Unauthenticated(RequestError):
    """The bearer token is missing or unknown."""

    status = "UNAUTHENTICATED"


class GrammarUnfollowed(RequestError):
    """No token of the output satisfies the grammar and the request's other limits, or it is too complex."""


class SwitchedOff(RequestError):
    """The configuration excludes this service."""

    status = "UNIMPLEMENTED"


class Unsupported(RequestError):
    """A call of another protocol that this server has no counterpart for."""

    status = "UNIMPLEMENTED"


class WrongState(RequestError):
    """The call does not fit the state of the server, for example a second profile at once."""

    status = "FAILED_PRECONDITION"


class RequestCancelled(RequestError):
    """The caller cancelled the call, or Control.Abort ended the request."""

    status = "CANCELLED"


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it finished."""

    status = "DEADLINE_EXCEEDED"


class Unavailable(EpServerError):
    """The server cannot serve now. Another one may."""

    status = "UNAVAILABLE"


class Draining(Unavailable):
    """The server is draining and takes no new requests."""


class RankLost(Unavailable):
    """A rank died and is not replaced. The server ends its streams and exits."""


class StartupError(EpServerError):
    """The server cannot start. The message says why, in one line."""

    status = "FAILED_PRECONDITION"


class ConfigError(FieldError, StartupError):
    """An option is unknown or out of its range."""

    status = "FAILED_PRECONDITION"


class CheckpointError(StartupError):
    """A checkpoint file or tensor is missing, broken or has the wrong shape."""


class ExchangeError(EpServerError):
    """Dispatch or combine failed."""


class PeerTimeout(ExchangeError):
    """A peer kept this rank waiting past the deadline.

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
    """A rank has ended, or one of another host timed out.

    Attributes:
        op, phase: where it was noticed. rank, peer: who noticed, and who is gone.
            The same rank twice: no rank noticed. The launcher reported that the process has ended.
    """

    def __init__(self, op: str, phase: str, rank: int, peer: int) -> None:
        reported = f"rank {peer} has ended, as the launcher reports"
        super().__init__(reported if rank == peer else f"rank {rank} lost peer {peer} in {op}/{phase}")
        self.op, self.phase, self.rank, self.peer = op, phase, rank, peer


class HookNotCalled(ExchangeError):
    """A bank is needed again, but the receive hook of its last operation never ran."""


class ProtocolViolation(ExchangeError):
    """A flag has a newer epoch than the one awaited: ranks ran different operations."""


class GroupAborted(ExchangeError):
    """An earlier error aborted the group. Every wait returns at once until it is reset."""


class InternalError(EpServerError):
    """A bug in the server. The message says which invariant broke."""
