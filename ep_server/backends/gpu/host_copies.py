"""Copies between a GPU's weights and host memory that is locked for it, on a stream of their own.

Units: bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from ep_server.errors import Unavailable
from ep_server.exchange.device_wait import await_event, await_stream

COPY_SECONDS = 60.0  # a copy waits for no peer but, at most, for steps that end within their own deadlines
PIECE_BYTES = 1 << 20  # copied at once beside steps, whose own small copies wait for one piece at most
BUFFER_BYTES = 4 << 20  # of a thread that copies to host memory
LOOK_SECONDS = 100e-6  # between two checks of a copy
_WHAT = "copies of experts"


class StreamHostCopies:
    """See HostCopies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._own = threading.local()
        self._begun: torch.cuda.Event | None = None
        with torch.cuda.device(device):
            self._piece = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        """See HostCopies. Raises: Unavailable if the system refuses to lock so many pages."""
        with torch.cuda.device(self._device):
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise Unavailable(
                f"{len(memory) / 2**30:.2f} GiB of host memory cannot be pinned (CUDA error {int(status)})"
            )

    def unpin(self, memory: torch.Tensor) -> None:
        """See HostCopies."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """See HostCopies."""
        event = self._begun = torch.cuda.current_stream(self._device).record_event()
        self._stream.wait_event(event)

    def upload(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """See HostCopies."""
        with torch.cuda.stream(self._stream):
            into.copy_(values, non_blocking=True)

    def finish(self) -> None:
        """See HostCopies."""
        await_stream(self._stream, COPY_SECONDS, _WHAT)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """See HostCopies."""
        self.begin()
        with torch.cuda.stream(self._stream):
            yield
        self.finish()

    def trickle(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """See HostCopies. One piece is in flight, so copies of steps need not queue behind many."""
        for at in range(0, len(into), PIECE_BYTES):
            values_now, into_now = values[at : at + PIECE_BYTES], into[at : at + PIECE_BYTES]
            piece = self._piece[: len(into_now)]
            piece.copy_(values_now)
            into_now.copy_(piece, non_blocking=True)
            await_event(
                torch.cuda.current_stream(self._device).record_event(), COPY_SECONDS, _WHAT, LOOK_SECONDS
            )

    def download(self, into: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Behind the last begin(), through a locked buffer of this thread: `into` may not be locked."""
        if not parts[0].is_cuda:
            torch.cat(list(parts), out=into)
            return
        (buffer, stream), at = self._buffer(), 0
        if self._begun is not None:
            stream.wait_event(self._begun)
        for piece in chain.from_iterable(torch.split(part, BUFFER_BYTES) for part in parts):
            with torch.cuda.stream(stream):
                buffer[: len(piece)].copy_(piece, non_blocking=True)
            await_event(stream.record_event(), COPY_SECONDS, _WHAT, LOOK_SECONDS)
            into[at : at + len(piece)].copy_(buffer[: len(piece)])
            at += len(piece)

    def _buffer(self) -> tuple[torch.Tensor, torch.cuda.Stream]:
        """Of this thread, and its stream."""
        if not hasattr(self._own, "buffer"):
            with torch.cuda.device(self._device):
                self._own.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
                self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._own.buffer, self._own.stream
