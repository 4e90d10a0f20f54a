"""[7] Reads and writes the KV of single tokens, for hand-offs between servers.

A row is everything that the cache keeps of one token: part after part, as KvCache.parts() orders them. It
does not depend on the block size, so both sides may cut their caches as they like. Rows travel in slots:
memory that one rank fills and the other reads, or both copy through a socket. Units: tokens, bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch

from ep_server.models.kv_cache import KvCache

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
HOST_SLOT_BYTES = 8 << 20  # short enough to wait for, long beside a message


class Kind(IntEnum):
    """Of the memory of slots.

    PRIVATE: of one process. SHARED: of the host. DEVICE: of a GPU of the host. FABRIC: of one process, which
    the network writes into.
    """

    PRIVATE = 0
    SHARED = 1
    DEVICE = 2
    FABRIC = 3


class Slots(Protocol):
    """Memory for `count` slots of `rows` rows each. descriptor: the other rank attaches it; -1: private."""

    kind: Kind
    rows: int
    descriptor: int

    def close(self) -> None:
        """Closes the descriptor; the memory lives as long as this object."""
        ...


class KvRows(Protocol):
    """The rows of a rank's cache. Place block * block_size + offset holds one row. Threads may share it."""

    @property
    def block_size(self) -> int:
        """Places of a block."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        ...

    @property
    def kind(self) -> Kind:
        """Of the memory of other ranks of this host that this one reads best."""
        ...

    @property
    def parts(self) -> int:
        """Parts of a row, those of each layer one after the other."""
        ...

    def plan_step(self) -> int:
        """A step was planned. Returns: its number. Called in the thread of the steps."""
        ...

    def written(self, step: int) -> int:
        """Leading parts of its rows that a step has written so far; 0 if that is unknown.

        As soon as there are any, earlier steps have written all of theirs.
        """
        ...

    def mark(self) -> Any:
        """What write() must come after: all steps launched so far. Called in the thread of the steps."""
        ...

    def offer(self, kind: Kind, rows: int, count: int) -> Slots:
        """New slots for a rank that reads memory of this kind; a device may offer host memory instead."""
        ...

    def attach(self, kind: Kind, rows: int, count: int, descriptor: int) -> Slots:
        """The slots that another rank offered for at most so many rows. Raises: OSError, RuntimeError.

        If memory of this kind is never reached, `kind` is another one from then on.
        """
        ...

    def read(self, places: torch.Tensor, parts: slice, slots: Any, slot: int) -> None:
        """Copies some parts of rows, which are computed, into a slot of offer(). places: [rows] int64."""
        ...

    def write(self, places: torch.Tensor, parts: slice, slots: Any, slot: int, after: Any) -> None:
        """Copies a slot of attach() or offer() into rows; done on return. after: from mark()."""
        ...


def places_of(blocks: Sequence[int], block_size: int, first: int, count: int) -> torch.Tensor:
    """Where the rows `first` to `first + count` of a table lie: [count] int64, on the host."""
    begin = first // block_size
    used = torch.tensor(blocks[begin : (first + count - 1) // block_size + 1], dtype=torch.int64)
    rows = torch.arange(first - begin * block_size, first - begin * block_size + count)
    return used[rows // block_size] * block_size + rows % block_size


class HostMemory(Protocol):
    """Slots in host memory."""

    def tensor(self, slot: int, size: int) -> torch.Tensor:
        """The first bytes of a slot: [size] uint8."""
        ...


class HostSlots:
    """In host memory, of this process or shared with others of the host."""

    def __init__(self, kind: Kind, rows: int, count: int, row_bytes: int, descriptor: int = -1) -> None:
        """rows: that are wanted; slots may have fewer. descriptor: of another rank's, which is closed.

        Raises: OSError.
        """
        self.kind, self.descriptor = kind, descriptor
        self.rows = max(1, min(HOST_SLOT_BYTES // row_bytes, rows))
        size = count * self.rows * row_bytes
        if kind is Kind.SHARED and descriptor < 0:
            self.descriptor = os.memfd_create("ep-server-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        elif descriptor >= 0 and not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("it may shrink")  # whose use would end this process
        memory = mmap.mmap(self.descriptor, size)  # fails if a descriptor's file is smaller
        self._memory = torch.frombuffer(memory, dtype=torch.uint8).view(count, -1)

    def tensor(self, slot: int, size: int) -> torch.Tensor:
        """The first bytes of a slot: [size] uint8."""
        return self._memory[slot, :size]

    def host(self, slot: int, size: int) -> memoryview:
        """The same for a socket."""
        flat: Any = self.tensor(slot, size).numpy()
        return memoryview(flat)

    def close(self) -> None:
        """As Slots.close."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class CpuRows:
    """Of a cache in host memory."""

    kind = Kind.SHARED

    def __init__(self, cache: KvCache) -> None:
        self.block_size = cache.block_size
        self._parts = [part.view(cache.blocks * cache.block_size, -1) for part in cache.parts()]
        self._part_bytes, self.parts = self._parts[0].shape[1], len(self._parts)
        self.row_bytes = self.parts * self._part_bytes
        self._progress, self._of_layer = cache.progress, self.parts // len(cache.layers)

    def plan_step(self) -> int:
        """As KvRows.plan_step."""
        return self._progress.plan_step()

    def written(self, step: int) -> int:
        """As KvRows.written."""
        return self._progress.layers_of(step) * self._of_layer

    def mark(self) -> None:
        """Steps have ended when they return."""

    def offer(self, kind: Kind, rows: int, count: int) -> HostSlots:
        """As KvRows.offer."""
        return HostSlots(min(kind, Kind.SHARED), rows, count, self.row_bytes)

    def attach(self, kind: Kind, rows: int, count: int, descriptor: int) -> HostSlots:
        """As KvRows.attach."""
        return HostSlots(kind, rows, count, self.row_bytes, descriptor)

    def read(self, places: torch.Tensor, parts: slice, slots: HostMemory, slot: int) -> None:
        """As KvRows.read."""
        chosen = self._parts[parts]
        rows = self._cut(slots, slot, len(places), len(chosen))
        for number, part in enumerate(chosen):
            rows[:, number] = part.index_select(0, places)

    def write(self, places: torch.Tensor, parts: slice, slots: HostMemory, slot: int, after: Any) -> None:
        """As KvRows.write."""
        chosen = self._parts[parts]
        rows = self._cut(slots, slot, len(places), len(chosen))
        for number, part in enumerate(chosen):
            part.index_copy_(0, places, rows[:, number])

    def _cut(self, slots: HostMemory, slot: int, rows: int, parts: int) -> torch.Tensor:
        return slots.tensor(slot, rows * parts * self._part_bytes).view(rows, parts, self._part_bytes)
