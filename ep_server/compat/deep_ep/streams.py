"""Which CUDA stream a call of a Buffer works on.

Without a hook a call runs on the communication stream, which first waits for the caller's; with a hook both
halves run on the stream that was current when the first one was called. Knows nothing of exchanges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ep_server.compat.deep_ep.events import EventHandle

T = TypeVar("T")
HIGH_PRIORITY = -1


class Streams:
    """The streams of one GPU that the calls of a Buffer use; `communication` belongs to the Buffer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.communication = torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self._not_awaited: EventHandle | None = None  # of the last call, if it was asynchronous

    def beside(self, work: Callable[[], T], *, asynchronous: bool) -> tuple[T, EventHandle | None]:
        """Enqueues `work` on the communication stream, after all that the current stream has to do by now.

        Returns: what work() returned, which must not be freed before the streams that use it know of it;
          the event at its end if asynchronous, else the current stream waits for it.
        """
        self.communication.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.communication):
            result = work()
            event = EventHandle()
        if asynchronous:
            self._not_awaited = None if capturing() else event  # a graph cannot wait for what is outside it
            return result, event
        event.current_stream_wait()
        self._not_awaited = None
        return result, None

    def current(self) -> torch.cuda.Stream:
        """The current stream, behind asynchronous calls that nobody waited for: sends keep their order."""
        if self._not_awaited is not None and not capturing():
            self._not_awaited.current_stream_wait()
            self._not_awaited = None
        return torch.cuda.current_stream(self.device)

    def synchronize(self) -> None:
        """Waits until the current and the communication stream have nothing to do."""
        torch.cuda.current_stream(self.device).synchronize()
        self.communication.synchronize()


def capturing() -> bool:
    """Whether calls on the current stream go into a graph instead of to the GPU."""
    return torch.cuda.is_current_stream_capturing()


def use_on(stream: torch.cuda.Stream, *tensors: torch.Tensor | None) -> None:
    """Tells the allocator: memory of these tensors is not free before `stream` has passed this point."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)
