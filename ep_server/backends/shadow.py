"""Experts in host memory, as slots hold them: the host shadow that all ranks map, or one rank's new weights.

Any rank may end while it writes an entry: the tag of an entry is written behind it. Units: bytes.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import groupby
from typing import Protocol

import torch

from ep_server.errors import Unavailable
from ep_server.models.experts import SlotMove, slot_parts
from ep_server.models.layers import ModelWeights, MoeWeights
from ep_server.models.shadow import ShadowLayout

log = logging.getLogger(__name__)

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # of Linux 5.14; Python has no name for them
POPULATE_BYTES = 2 << 20  # at once: the process can map no other memory meanwhile
LOCK_BYTES = 32 << 20  # at once, roughly: the driver may delay launches of steps meanwhile
MEASURED = 3  # samples of a rate, the fastest of which counts: other programs disturb the others


class HostCopies(Protocol):
    """Copies between a rank's weights and host memory. Several threads may copy at once."""

    def pin(self, memory: torch.Tensor) -> None:
        """Locks memory for fast copies, until unpin() or the end of the process.

        Args: a tensor of bytes, of which no page is locked yet. Raises: Unavailable.
        """
        ...

    def unpin(self, memory: torch.Tensor) -> None:
        """Ends what pin() of the same tensor began. No copy of it is in flight."""
        ...

    def begin(self) -> None:
        """What is copied from here on is copied behind the work of the device's current stream."""
        ...

    def upload(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Begins a copy of host memory into weights. values: do not change before finish()."""
        ...

    def finish(self) -> None:
        """Returns once all copies have ended. Raises: InternalError if they do not."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """Work of this thread for the device: behind what steps have enqueued, beside later ones.

        At its end that work has ended. Raises: InternalError if it does not.
        """
        ...

    def trickle(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Copies host memory, locked or not, into weights in small pieces, within beside()."""
        ...

    def download(self, into: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Copies parts of weights into host memory, end to end, behind the last begin().

        All are tensors of bytes. Several threads may call it.
        """
        ...


class PlainCopies:
    """See HostCopies, where weights are in host memory."""

    def pin(self, memory: torch.Tensor) -> None:
        """Nothing."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Nothing."""

    def begin(self) -> None:
        """Nothing."""

    def upload(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Copies at once."""
        into.copy_(values)

    def finish(self) -> None:
        """Nothing."""

    def beside(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def trickle(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Copies at once."""
        into.copy_(values)

    def download(self, into: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """See HostCopies."""
        torch.cat(list(parts), out=into)


def copies_for(device: torch.device) -> HostCopies:
    """For weights on a device."""
    if device.type != "cuda":
        return PlainCopies()
    from ep_server.backends.gpu.host_copies import StreamHostCopies

    return StreamHostCopies(device)


class HostExperts:
    """Entries in host memory. One thread loads; several may write entries, each its own.

    fd: of memory that other processes map too; None = private memory, which goes with this object.
    copies: of the device that the weights are on.
    """

    def __init__(self, layout: ShadowLayout, copies: HostCopies, fd: int | None = None) -> None:
        """Raises: OSError."""
        self.layout, self.copies, self._fd = layout, copies, fd
        if fd is None:
            self._mapped = mmap.mmap(-1, layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._mapped = mmap.mmap(fd, layout.nbytes, flags=mmap.MAP_SHARED)
        with suppress(OSError):  # only faster to lock
            self._mapped.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._tags = self._memory[: 4 * layout.count].view(torch.int32)
        self._pinned: set[int] = set()  # numbers of entries
        self._locked: list[torch.Tensor] = []
        self._pinning = threading.Lock()
        weakref.finalize(self, _unlock, copies, self._locked).atexit = False

    def holds(self, version: int, layer: int, entry: int) -> bool:
        """Whether an entry holds its expert of these weights."""
        return self.layout.sparse[layer] and int(self._tags[self.layout.number(layer, entry)]) == version + 1

    def write(self, version: int, layer: int, entry: int, parts: Sequence[torch.Tensor]) -> None:
        """Fills an entry from the parts of a slot, on any device. Raises: Unavailable without memory."""
        number = self.layout.number(layer, entry)
        self._tags[number] = 0
        self._populate(self.layout.tag_bytes + number * self.layout.pitch, self.layout.pitch)
        self.copies.download(self._entry(number), parts)
        self._tags[number] = version + 1

    def _populate(self, begin: int, size: int) -> None:
        """Makes pages that are not there: their first touch would end the process where there is no memory.

        In every thread by itself. Allocating them for the descriptor takes a lock of all processes.
        Raises: Unavailable.
        """
        if self._fd is None:
            return
        try:
            if not populated(self._memory[begin : begin + size], MADV_POPULATE_WRITE):
                os.posix_fallocate(self._fd, begin, size)
        except OSError as error:
            raise Unavailable(
                f"no memory for {self.layout.nbytes / 2**30:.2f} GiB of experts ({error.strerror})"
            ) from error

    def save(
        self,
        weights: ModelWeights,
        slots: Sequence[SlotMove],
        version: int,
        pool: ThreadPoolExecutor,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> int:
        """Fills the entries of what slots hold, unless others have. Returns: how many. Raises: as write()."""
        wanted = self.lacking(slots, version)
        self.copies.begin()

        def save(slot: SlotMove) -> None:
            self.write(version, slot.layer, slot.expert, _parts(weights, slot))

        writes = [pool.submit(save, slot) for slot in wanted]
        try:
            for done, made in enumerate(writes, 1):
                made.result()
                progress(done, len(wanted))
        finally:  # after an error too, no slot is read any more: the caller may change them
            for made in writes:
                made.cancel()
            wait(writes)
        return len(wanted)

    def lacking(self, slots: Sequence[SlotMove], version: int) -> list[SlotMove]:
        """Those of the slots whose experts no entry holds."""
        layout = self.layout
        sparse = [one for one in slots if layout.sparse[one.layer]]
        numbers = torch.tensor([layout.number(one.layer, one.expert) for one in sparse], dtype=torch.int64)
        tags = self._tags[numbers].tolist()  # at once: other threads of the process run steps
        return [one for one, tag in zip(sparse, tags, strict=True) if tag != version + 1]

    def outdated(self, version: int) -> bool:
        """Whether ranks have begun to write newer weights."""
        return bool((self._tags > version + 1).any())

    def pin(self, wanted: Sequence[tuple[int, int]], rest: float = 0.0) -> None:
        """Locks entries, (layer, entry), for fast copies. Several threads may call it.

        rest: seconds between two pieces, in which the driver does other work. Raises: Unavailable.
        """
        layout = self.layout
        numbers = sorted({layout.number(*one) for one in wanted if layout.sparse[one[0]]})
        for run in _runs(numbers, max(1, LOCK_BYTES // layout.pitch)):
            with self._pinning:
                for part in _runs([number for number in run if number not in self._pinned], len(run)):
                    begin = layout.tag_bytes + part.start * layout.pitch
                    memory = self._memory[begin : begin + len(part) * layout.pitch]
                    self._map(memory)
                    self.copies.pin(memory)
                    self._pinned.update(part)
                    self._locked.append(memory)
            if rest:
                time.sleep(rest)

    def _map(self, memory: torch.Tensor) -> None:
        """Maps pages that other processes have made. The driver would do it too, but hold its locks."""
        if self._fd is not None:
            with suppress(OSError):  # the driver will say so
                populated(memory, MADV_POPULATE_READ)

    def load(self, weights: ModelWeights, moves: Sequence[SlotMove], version: int) -> list[SlotMove]:
        """Copies entries into slots that no rows are for meanwhile.

        Returns: the moves without an entry, or whose entry was written meanwhile. Raises: InternalError.
        """
        there = [move for move in moves if self.holds(version, move.layer, move.expert)]
        try:
            self.pin([(move.layer, move.expert) for move in there])
        except Unavailable as error:
            log.warning("experts are copied slower: %s", error)
        self.copies.begin()
        for move in there:
            entry, at = self._entry(self.layout.number(move.layer, move.expert)), 0
            for part in _parts(weights, move):
                self.copies.upload(part, entry[at : at + len(part)])
                at += len(part)
        self.copies.finish()
        loaded = {move for move in there if self.holds(version, move.layer, move.expert)}
        return [move for move in moves if move not in loaded]

    def load_beside(self, weights: ModelWeights, move: SlotMove, version: int) -> bool:
        """Copies an entry into a slot that no rows are for meanwhile, so that steps are not disturbed.

        No memory is locked for that: the driver would delay launches. Returns: False if there is no entry,
        or it was written meanwhile. Raises: InternalError.
        """
        if not self.holds(version, move.layer, move.expert):
            return False
        entry, at = self._entry(self.layout.number(move.layer, move.expert)), 0
        with self.copies.beside():
            for part in _parts(weights, move):
                self.copies.trickle(part, entry[at : at + len(part)])
                at += len(part)
        return self.holds(version, move.layer, move.expert)

    def _entry(self, number: int) -> torch.Tensor:
        begin = self.layout.tag_bytes + number * self.layout.pitch
        return self._memory[begin : begin + self.layout.expert_bytes]


class HostTensors:
    """Tensors of host memory that weights will be overwritten with, in memory locked for that.

    tensors: the same values, in the same order.
    """

    def __init__(self, values: Sequence[torch.Tensor], copies: HostCopies) -> None:
        """Raises: Unavailable."""
        self._copies, self.tensors = copies, list(values)
        self._locked: list[torch.Tensor] = []
        weakref.finalize(self, _unlock, copies, self._locked).atexit = False
        if isinstance(copies, PlainCopies):
            return
        for part in _parts_of(self.tensors):
            size = sum(_aligned(self.tensors[index].nbytes) for index in part)
            memory = torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)
            at = 0
            for index in part:
                tensor = self.tensors[index]
                room = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                self.tensors[index] = room.copy_(tensor)
                at += _aligned(tensor.nbytes)
            copies.pin(memory)
            self._locked.append(memory)

    def copy_rate(self, device: torch.device, sample_bytes: int) -> float:
        """Bytes per second of copies to the device, into memory that is there already; of a sample."""
        every = max(1, sum(tensor.nbytes for tensor in self.tensors) // sample_bytes)
        sample = [tensor.reshape(-1)[: sample_bytes // 4] for tensor in self.tensors[::every]]
        into = [torch.zeros_like(tensor, device=device) for tensor in sample]
        self._copies.begin()
        self._copies.finish()
        seconds = []
        for _ in range(MEASURED):
            began = time.perf_counter()
            for held, new in zip(into, sample, strict=True):
                self._copies.upload(held, new)
            self._copies.finish()
            seconds.append(time.perf_counter() - began)
        return sum(tensor.nbytes for tensor in sample) / min(seconds)


def populated(memory: torch.Tensor, advice: int) -> bool:
    """Makes and maps the pages of a mapping, or only maps those that are there.

    advice: MADV_POPULATE_WRITE or MADV_POPULATE_READ. Returns: False if the system knows neither.
    Raises: OSError without memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for piece in torch.split(memory, POPULATE_BYTES):
        if libc.madvise(ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(len(piece)), advice) == 0:
            continue
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            return False
        raise OSError(code, "out of memory" if code == errno.EFAULT else os.strerror(code))
    return True


def _unlock(copies: HostCopies, memory: list[torch.Tensor]) -> None:
    """In a thread of its own: it takes long, and steps may run."""

    def unlock() -> None:
        for one in memory:
            copies.unpin(one)
        memory.clear()

    if memory:
        threading.Thread(target=unlock, name="unlock", daemon=True).start()


def _parts_of(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Cuts a list into parts of LOCK_BYTES or a little more: the numbers of each."""
    part, size = list[int](), 0
    for index, tensor in enumerate(tensors):
        part.append(index)
        size += tensor.nbytes
        if size >= LOCK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _parts(weights: ModelWeights, slot: SlotMove) -> list[torch.Tensor]:
    ffn = weights.layers[slot.layer].ffn
    assert isinstance(ffn, MoeWeights)
    return slot_parts(ffn.experts, slot.slot)


def _runs(numbers: Sequence[int], most: int) -> Iterator[range]:
    """Consecutive numbers of an ascending sequence, at most so many."""
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        for first in range(run[0], run[-1] + 1, most):
            yield range(first, min(first + most, run[-1] + 1))
