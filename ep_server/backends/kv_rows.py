"""[7] Reads and writes the KV of single tokens, for hand-offs between servers.

A row is everything that the cache keeps of one token: part after part, as KvCache.parts() orders them. It
does not depend on the block size, so both sides may cut their caches as they like. Rows travel in slots:
memory that one rank fills and the other reads, or both copy through a socket. Units: tokens, bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch

from ep_server.models.kv_cache import KvCache

HOST_SLOT_BYTES = 8 << 20  # short enough to wait for, long beside a message


class Kind(IntEnum):
    """Of the memory of slots. PRIVATE: of one process. SHARED: of the host. DEVICE: of a GPU of the host."""

    PRIVATE = 0
    SHARED = 1
    DEVICE = 2


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

    def warm_up(self) -> None:
        """Moves a row onto itself, before anyone uses the cache."""
        ...

    def mark(self) -> Any:
        """What write() must come after: all steps launched so far. Called in the thread of the steps."""
        ...

    def offer(self, kind: Kind, rows: int, count: int) -> Slots:
        """New slots for a rank that reads memory of this kind; a device may offer host memory instead."""
        ...

    def attach(self, kind: Kind, rows: int, count: int, descriptor: int) -> Slots:
        """The slots that another rank offered for at most so many rows. Raises: OSError, RuntimeError."""
        ...

    def read(self, places: Sequence[int], slots: Any, slot: int) -> None:
        """Copies rows that are computed into a slot of offer()."""
        ...

    def write(self, places: Sequence[int], slots: Any, slot: int, after: Any) -> None:
        """Copies a slot of attach() or offer() into rows; done on return. after: from mark()."""
        ...


class HostSlots:
    """In host memory."""

    def __init__(self, kind: Kind, rows: int, count: int, row_bytes: int, descriptor: int = -1) -> None:
        """rows: that are wanted; slots may have fewer. descriptor: of another rank's, which is closed.

        Raises: OSError.
        """
        self.kind, self.descriptor = kind, descriptor
        self.rows = max(1, min(HOST_SLOT_BYTES // row_bytes, rows))
        size = count * self.rows * row_bytes
        if kind is Kind.SHARED and descriptor < 0:
            self.descriptor = os.memfd_create("ep-server-kv", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
        memory = mmap.mmap(self.descriptor, size)  # fails if a descriptor's file is smaller
        self._memory = torch.frombuffer(memory, dtype=torch.uint8).view(count, self.rows, row_bytes)

    def tensor(self, slot: int, rows: int) -> torch.Tensor:
        """The first rows of a slot: [rows, row_bytes] uint8."""
        return self._memory[slot, :rows]

    def host(self, slot: int, rows: int) -> memoryview:
        """The bytes of the first rows of a slot, for a socket."""
        flat: Any = self.tensor(slot, rows).view(-1).numpy()
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
        self._part_bytes = self._parts[0].shape[1]
        self.row_bytes = len(self._parts) * self._part_bytes

    def warm_up(self) -> None:
        """Nothing is compiled here."""

    def mark(self) -> None:
        """Steps have ended when they return."""

    def offer(self, kind: Kind, rows: int, count: int) -> HostSlots:
        """As KvRows.offer."""
        return HostSlots(min(kind, Kind.SHARED), rows, count, self.row_bytes)

    def attach(self, kind: Kind, rows: int, count: int, descriptor: int) -> HostSlots:
        """As KvRows.attach."""
        return HostSlots(kind, rows, count, self.row_bytes, descriptor)

    def read(self, places: Sequence[int], slots: HostSlots, slot: int) -> None:
        """As KvRows.read."""
        rows, index = self._cut(slots, slot, len(places)), torch.tensor(places)
        for number, part in enumerate(self._parts):
            rows[:, number] = part.index_select(0, index)

    def write(self, places: Sequence[int], slots: HostSlots, slot: int, after: Any) -> None:
        """As KvRows.write."""
        rows, index = self._cut(slots, slot, len(places)), torch.tensor(places)
        for number, part in enumerate(self._parts):
            part.index_copy_(0, index, rows[:, number])

    def _cut(self, slots: HostSlots, slot: int, count: int) -> torch.Tensor:
        return slots.tensor(slot, count).view(count, len(self._parts), self._part_bytes)
