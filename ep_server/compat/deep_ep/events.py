"""Events and streams of a Buffer's calls, in DeepEP's form.

Without a hook, a call runs on the communication stream, which first waits for the caller's stream. With a
hook, both halves run on the stream that was current at the first half. Calls on CPU tensors return when done.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.device_wait import await_stream

T = TypeVar("T")
HIGH_PRIORITY = -1
HINT_TOKENS = 4096
HINT_ROW_DATA = 512  # bytes that go with a row: ids, weights, scales


class EventHandle:
    """A point on the CUDA stream that is current at construction. Already passed if CUDA is not in use."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """Makes later work on the current stream wait for the event. The caller does not wait."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """The result of a call with async_finish. As a `with` block, the stream waits for the event at its end.

    Attributes:
        event: None if the call was not asynchronous.
        extra_tensors: kept alive as long as this object.
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event.

        Raises: InvalidArgument if the call was not asynchronous.
        """
        if self.event is None:
            raise InvalidArgument(
                "event", None, "an event: pass async_finish=True to the call that returns it"
            )
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


@dataclass(frozen=True, slots=True)
class Config:
    """How many multiprocessors a high-throughput kernel fills. The chunk sizes are accepted and not used.

    Rows go straight to their final place, so there are no chunks to tune.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.num_sms, int) or self.num_sms < 1:
            raise InvalidArgument("num_sms", self.num_sms, "an integer, at least 1")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """num_nvl_bytes for HINT_TOKENS tokens per rank of `hidden_bytes` each, all sent to all ranks."""
        return (2 * num_ranks - 1) * HINT_TOKENS * (hidden_bytes + HINT_ROW_DATA)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: ranks of one host need none."""
        return 0


class Streams:
    """The streams of one GPU that a Buffer's calls use. `communication` belongs to the Buffer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.communication = torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self._last: EventHandle | None = None  # of the last call, if it was asynchronous

    def communicate(
        self, work: Callable[[], T], *, asynchronous: bool, after: EventHandle | None = None
    ) -> tuple[T, EventHandle | None]:
        """Enqueues `work` on the communication stream, behind everything the current stream has so far.

        Args:
            after: the work waits for this event instead.
        Returns: what work() returned, and the
          event at the end of the work if asynchronous, else None: the current stream then waits for it.
        """
        if after is None:
            self.communication.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.communication):
            if after is not None:
                after.current_stream_wait()
            result = work()
            event = EventHandle()
        if asynchronous:
            self._last = None if capturing() else event  # a graph cannot wait for an event outside of it
            return result, event
        event.current_stream_wait()
        self._last = None
        return result, None

    def resumed(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes a context in which the current stream of now is current again, for the second half.

        The stream continues behind asynchronous calls that nobody waited for, so sends keep their order.
        """
        if self._last is not None and not capturing():
            self._last.current_stream_wait()
            self._last = None
        stream = torch.cuda.current_stream(self.device)
        return lambda: torch.cuda.stream(stream)

    def synchronize(self, seconds: float) -> None:
        """Waits until the current stream and the communication stream are idle.

        Raises: InternalError if one of them is not after so many seconds.
        """
        for stream in (torch.cuda.current_stream(self.device), self.communication):
            await_stream(stream, seconds, "the calls of a Buffer")

    def record_use(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the allocator from reusing their memory before the communication stream has passed now."""
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.communication)

    def record_result(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the allocator from reusing memory of the communication stream that the current one reads."""
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def capturing(self) -> bool:
        """Whether calls on the current stream are captured into a graph."""
        return capturing()


class HostStreams:
    """In place of Streams for CPU tensors: calls are done when they return."""

    def communicate(
        self, work: Callable[[], T], *, asynchronous: bool, after: EventHandle | None = None
    ) -> tuple[T, EventHandle | None]:
        """See Streams."""
        return work(), EventHandle() if asynchronous else None

    def resumed(self) -> Callable[[], AbstractContextManager[object]]:
        """See Streams."""
        return nullcontext

    def synchronize(self, seconds: float) -> None:
        """Does nothing."""

    def record_use(self, *tensors: torch.Tensor | None) -> None:
        """Does nothing."""

    def record_result(self, *tensors: torch.Tensor | None) -> None:
        """Does nothing."""

    def capturing(self) -> bool:
        """Never."""
        return False


def capturing() -> bool:
    """Whether calls on the current stream are captured into a graph."""
    return torch.cuda.is_current_stream_capturing()
