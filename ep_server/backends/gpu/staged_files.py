"""Copies stored tensors from files to a GPU through a few buffers of pinned memory.

A memory mapping would be copied page by page, by one thread, through a buffer of the driver. Here each thread
reads into one of its buffers while the copy engine empties the other. Units: bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Protocol

import torch

from ep_server.backends.gpu.waiting import Event, await_event
from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import StoredTensor
from ep_server.models.loading import TORCH, OpenShards

BUFFER_BYTES = 4 << 20  # small enough to stay in the processor's cache between read and copy
BUFFERS = 2  # of each thread: one is read into while the other is copied from
COPY_SECONDS = 60.0  # a copy waits for no peer, only for copies before it
LOOK_SECONDS = 200e-6  # between two checks of a copy; other threads' buffers keep the engine busy
_WHAT = "copies of weights"


class Copies(Protocol):
    """Asynchronous copies of bytes to one device."""

    @property
    def device(self) -> torch.device:
        """The device."""
        ...

    def buffer(self, size: int) -> torch.Tensor:
        """[size] uint8 of host memory to copy from."""
        ...

    def start(self, into: torch.Tensor, values: torch.Tensor) -> Event:
        """Begins a copy. values: part of a buffer, which must not change until the event has passed."""
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

    def buffer(self, size: int) -> torch.Tensor:
        """Pinned memory, which the device can read."""
        with torch.cuda.device(self.device):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def start(self, into: torch.Tensor, values: torch.Tensor) -> Event:
        """See Copies."""
        into.copy_(values, non_blocking=True)
        return self._passed()

    def finish(self) -> None:
        """Also frees the device memory of temporary tensors, unless kept: the KV cache can use it then."""
        await_event(self._passed(), COPY_SECONDS, _WHAT)
        if not self._keeps:
            torch.cuda.empty_cache()

    def _passed(self) -> Event:
        event: Event = torch.cuda.current_stream(self.device).record_event()
        return event


class StagedFiles(OpenShards[int]):
    """See shards.TensorFiles. Reads only the bytes of loaded tensors, into BUFFERS * buffer_bytes of host
    memory for each loading thread. A context, which closes the files at its end.
    """

    def __init__(self, copies: Copies, buffer_bytes: int = BUFFER_BYTES) -> None:
        super().__init__()
        self._copies, self._buffer_bytes = copies, buffer_bytes
        self._own = threading.local()

    def load(
        self, stored: StoredTensor, part: int | None = None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See shards.TensorFiles."""
        if into is None:
            shape = stored.shape if part is None else stored.shape[1:]
            into = torch.empty(shape, dtype=TORCH[stored.dtype], device=self._copies.device)
        target = into.view(-1).view(torch.uint8)
        begin = stored.begin + (part or 0) * len(target)
        try:
            file = self.shard(stored.file)
            for at in range(0, len(target), self._buffer_bytes):
                piece = target[at : at + self._buffer_bytes]
                next(self._buffers()).read_and_copy(piece, file, begin + at)
        except OSError as error:
            raise CheckpointError(f"{stored.file}: tensor {stored.name}: cannot be read ({error})") from error
        return into

    def finish(self) -> None:
        """See shards.TensorFiles. Raises: InternalError after COPY_SECONDS."""
        self._copies.finish()

    def _buffers(self) -> Iterator[_Buffer]:
        """The buffers of this thread, in turn."""
        if not hasattr(self._own, "buffers"):
            self._own.buffers = cycle([_Buffer(self._copies, self._buffer_bytes) for _ in range(BUFFERS)])
        buffers: Iterator[_Buffer] = self._own.buffers
        return buffers

    def open_shard(self, file: Path, closing: ExitStack) -> int:
        """The descriptor of a file."""
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        closing.callback(os.close, descriptor)
        return descriptor


class _Buffer:
    """A buffer of one thread, and the copy that still reads it."""

    def __init__(self, copies: Copies, size: int) -> None:
        self._copies, self._host = copies, copies.buffer(size)
        self._bytes = self._host.numpy().data
        self._copied: Event | None = None

    def read_and_copy(self, into: torch.Tensor, file: int, begin: int) -> None:
        """Bytes of a file from `begin` on into all of `into`: [n] uint8. Raises: OSError."""
        if self._copied is not None:
            await_event(self._copied, COPY_SECONDS, _WHAT, LOOK_SECONDS)
        done, size = 0, len(into)
        while done < size:
            count = os.preadv(file, [self._bytes[done:size]], begin + done)
            if not count:
                raise OSError(f"the file ends at byte {begin + done}")
            done += count
        self._copied = self._copies.start(into, self._host[:size])
