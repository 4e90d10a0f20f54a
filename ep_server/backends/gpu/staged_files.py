"""Copies stored tensors from files to a GPU through a few buffers of pinned memory.

A memory mapping would be copied page by page, by one thread, through a buffer of the driver. Here each thread
reads into one of its buffers while the copy engine empties the other, many tensors at a time: with a call for
each tensor, threads wait for the interpreter most of the time. Units: bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from ep_server.backends.gpu.capability import native
from ep_server.errors import InternalError
from ep_server.exchange.device_wait import await_current
from ep_server.models.checkpoint import StoredTensor
from ep_server.models.loading import TORCH, OpenShards, unreadable

BUFFER_BYTES = 4 << 20  # small enough to stay in the processor's cache between read and copy
BUFFERS = 2  # of each thread: one is read into while the other is copied from
COPY_SECONDS = 60.0  # a copy waits for no peer, only for copies before it


class Piece(NamedTuple):
    """Bytes of an open file from `begin` on, and where they belong on the device."""

    file: int
    begin: int
    size: int
    into: int


class Reader(Protocol):
    """Reads files into memory of a device. For one thread."""

    def read(self, pieces: Sequence[Piece]) -> tuple[int, str] | None:
        """Work of the device's current stream finds them there.

        Returns: the number of a piece that cannot be read, and why; None if there is none.
        Raises: InternalError if the device fails.
        """
        ...


class Copies(Protocol):
    """Asynchronous copies from files to one device."""

    @property
    def device(self) -> torch.device:
        """The device."""
        ...

    def reader(self, buffer_bytes: int) -> Reader:
        """One with buffers of that size."""
        ...

    def finish(self) -> None:
        """Returns when all copies have ended."""
        ...


class StreamCopies:
    """Copies on the current stream of the device, so that later work on it sees the bytes.

    One stream is enough for all threads: a single engine makes all copies to a GPU, in order.
    keeps: device memory of temporary tensors stays with the process, as freeing it waits for all other work.
    """

    def __init__(self, device: torch.device, *, keeps: bool = False) -> None:
        self.device, self._keeps = device, keeps

    def reader(self, buffer_bytes: int) -> Reader:
        """See Copies."""
        with torch.cuda.device(self.device):
            buffers = torch.empty(BUFFERS, buffer_bytes, dtype=torch.uint8, pin_memory=True)
            number = torch.cuda.current_device()
        return NativeReader(
            native(), number, buffers, lambda: torch.cuda.current_stream(self.device).cuda_stream
        )

    def finish(self) -> None:
        """Also frees the device memory of temporary tensors, unless kept: the KV cache can use it then."""
        await_current(self.device, COPY_SECONDS, "copies of weights")
        if not self._keeps:
            torch.cuda.empty_cache()


class NativeReader:
    """See Reader. Reads by csrc/loading, which leaves the interpreter to other threads."""

    def __init__(self, module: Any, device: int, buffers: torch.Tensor, stream: Callable[[], int]) -> None:
        """module: with that code. buffers: [n, bytes] uint8 of host memory. stream: the current one."""
        self._buffers, self._stream = buffers, stream
        self._native = module.StagedReader(
            device=device,
            buffers=[buffer.data_ptr() for buffer in buffers],
            buffer_bytes=buffers.shape[1],
            seconds=COPY_SECONDS,
        )

    def read(self, pieces: Sequence[Piece]) -> tuple[int, str] | None:
        """See Reader."""
        try:
            wrong: tuple[int, str] | None = self._native.read(stream=self._stream(), pieces=pieces)
        except RuntimeError as error:
            raise InternalError(f"weights: {error}") from error
        return wrong


class StagedFiles(OpenShards):
    """See loading.TensorFiles. Reads only the bytes of loaded tensors, into BUFFERS * buffer_bytes of host
    memory for each loading thread. A context: at its end no copy is in flight, and the files are closed.
    """

    def __init__(self, copies: Copies, buffer_bytes: int = BUFFER_BYTES) -> None:
        super().__init__()
        self._copies, self._buffer_bytes = copies, buffer_bytes
        self._own = _OwnOfThread()
        self._readers: list[Reader] = []  # also of ended threads: copies read their buffers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is not None and not isinstance(error, InternalError):  # else the device may be lost
            with suppress(InternalError):  # the first error is the cause
                self._copies.finish()

    def load(self, stored: StoredTensor, part: int | None = None) -> torch.Tensor:
        """See loading.TensorFiles."""
        shape = stored.shape if part is None else stored.shape[1:]
        into = torch.empty(shape, dtype=TORCH[stored.dtype], device=self._copies.device)
        self._read([self._wanted(into, stored, part)])
        return into

    def fill(self, into: torch.Tensor, stored: StoredTensor, part: int | None = None) -> None:
        """See loading.TensorFiles."""
        self._own.wanted.append(self._wanted(into, stored, part))

    def flush(self) -> None:
        """See loading.TensorFiles."""
        wanted, self._own.wanted = self._own.wanted, []
        self._read(wanted)

    def finish(self) -> None:
        """See loading.TensorFiles. Raises: InternalError after COPY_SECONDS."""
        self._copies.finish()

    def _wanted(self, into: torch.Tensor, stored: StoredTensor, part: int | None) -> _Wanted:
        try:
            file = self.shard(stored.file)
        except OSError as error:
            raise unreadable(stored, error) from error
        begin = stored.begin + (part or 0) * into.nbytes
        return _Wanted(stored, into, Piece(file, begin, into.nbytes, into.data_ptr()))

    def _read(self, wanted: Sequence[_Wanted]) -> None:
        if self._own.reader is None:
            self._own.reader = self._copies.reader(self._buffer_bytes)
            self._readers.append(self._own.reader)
        wrong = self._own.reader.read([one.piece for one in wanted])
        if wrong is not None:
            number, why = wrong
            raise unreadable(wanted[number].stored, why)


class _Wanted(NamedTuple):
    """into: kept until the values are there."""

    stored: StoredTensor
    into: torch.Tensor
    piece: Piece


class _OwnOfThread(threading.local):
    """What each thread has of its own. wanted: by fill(), until flush()."""

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self.wanted: list[_Wanted] = []
