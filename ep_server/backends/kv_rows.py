"""[7] Reads and writes the KV of single tokens, for hand-offs between servers.

A row is everything that the cache keeps of one token: part after part, as KvCache.parts() orders them. It
does not depend on the block size, so both sides may cut their caches as they like. Units: tokens, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ep_server.models.kv_cache import KvCache


class KvRows(Protocol):
    """The rows of a rank's cache. Slot block * block_size + offset holds one row. Threads may share it."""

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        ...

    def mark(self) -> Any:
        """What write() must come after: all steps launched so far. Called in the thread of the steps."""
        ...

    def read(self, slots: Sequence[int], out: torch.Tensor) -> None:
        """Copies rows that are computed into host memory. out: [at least len(slots), row_bytes] uint8."""
        ...

    def write(self, slots: Sequence[int], rows: torch.Tensor, after: Any) -> None:
        """Copies host memory into rows; done on return. rows: as `out` of read(). after: from mark()."""
        ...


class CpuRows:
    """Of a cache in host memory."""

    def __init__(self, cache: KvCache) -> None:
        self.block_size = cache.block_size
        self._parts = [part.view(cache.blocks * cache.block_size, -1) for part in cache.parts()]
        self._part_bytes = self._parts[0].shape[1]
        self.row_bytes = len(self._parts) * self._part_bytes

    def mark(self) -> None:
        """Steps have ended when they return."""

    def read(self, slots: Sequence[int], out: torch.Tensor) -> None:
        """As KvRows.read."""
        rows, index = self._cut(out, len(slots)), torch.tensor(slots)
        for number, part in enumerate(self._parts):
            rows[:, number] = part.index_select(0, index)

    def write(self, slots: Sequence[int], rows: torch.Tensor, after: Any) -> None:
        """As KvRows.write."""
        cut, index = self._cut(rows, len(slots)), torch.tensor(slots)
        for number, part in enumerate(self._parts):
            part.index_copy_(0, index, cut[:, number])

    def _cut(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        return rows[:count].view(count, len(self._parts), self._part_bytes)
