"""Events of asynchronous calls in DeepEP's form. Calls on CPU tensors have finished when they return.

Knows streams, nothing of communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ep_server.errors import InvalidArgument


class EventHandle:
    """A point of the CUDA stream that is current when it is made; passed already where CUDA is not in use."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """What is enqueued on the current stream from here on waits for the event; the caller does not."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """What a call with async_finish returns; also a `with` block at whose end the stream waits for the event.

    Attributes:
        event: None where the call was not asynchronous.
        extra_tensors: kept alive as long as this object.
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Lets the current stream wait for the event.

        Raises: InvalidArgument where the call was not asynchronous.
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
    """Chunk sizes of high-throughput kernels, tokens; the low-latency calls do not read them."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256
