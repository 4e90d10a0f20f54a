"""[7] Copies KV blocks between a rank's cache and host memory. The scheduler decides which (KvMoves).

A slot in host memory holds all bytes of one block, so the layout of the cache does not matter.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ep_server.models.kv_cache import KvCache, zeros
from ep_server.records import KvMoves


class KvCopier(Protocol):
    """The host tier's memory, and what fills it. slots: blocks that it holds."""

    @property
    def slots(self) -> int:
        """KV blocks that it holds."""
        ...

    def start(self, moves: KvMoves) -> None:
        """Begins copies that precede the next step. Returns at once where a device does the work.

        Loads may begin later: with start_loads(), or the next start() or loaded().
        """
        ...

    def start_loads(self) -> None:
        """Begins the loads that were not begun. Call it once the step is launched: they delay its launch."""
        ...

    def loaded(self) -> list[int]:
        """Tickets of the loads that have ended since the last call. Raises: InternalError if one does not."""
        ...

    def counters(self) -> dict[str, int]:
        """Cumulative bytes, under the names of RankStatistics.counters."""
        ...


class NoCopies:
    """Without a host tier."""

    slots = 0

    def start(self, moves: KvMoves) -> None:
        """There are none."""

    def start_loads(self) -> None:
        """There are none."""

    def loaded(self) -> list[int]:
        """Never any."""
        return []

    def counters(self) -> dict[str, int]:
        """None."""
        return {}


class CpuCopies:
    """For a cache in host memory. Every copy has ended when start() returns."""

    def __init__(self, cache: KvCache, slots: int) -> None:
        self.slots = slots
        self._blocks = cache.parts()
        self._host = [zeros((slots, part.shape[1]), torch.uint8, part.device) for part in self._blocks]
        self._block_bytes = sum(part.shape[1] for part in self._blocks)
        self._saved = self._loaded = 0
        self._ended: list[int] = []

    def start(self, moves: KvMoves) -> None:
        """As KvCopier.start."""
        if moves.saves:
            block, slot = torch.tensor(moves.saves).unbind(1)
            for part, host in zip(self._blocks, self._host, strict=True):
                host.index_copy_(0, slot, part.index_select(0, block))
            self._saved += len(moves.saves)
        for load in moves.loads:
            block, slot = torch.tensor(load.copies).unbind(1)
            for part, host in zip(self._blocks, self._host, strict=True):
                part.index_copy_(0, block, host.index_select(0, slot))
            self._loaded += len(load.copies)
            self._ended.append(load.ticket)

    def start_loads(self) -> None:
        """start() has begun them."""

    def loaded(self) -> list[int]:
        """As KvCopier.loaded."""
        ended, self._ended = self._ended, []
        return ended

    def counters(self) -> dict[str, int]:
        """As KvCopier.counters."""
        return counters_of(self._saved * self._block_bytes, self._loaded * self._block_bytes)


def counters_of(saved: int, loaded: int) -> dict[str, int]:
    """KvCopier.counters() of so many bytes."""
    return {"kv_saved_bytes": saved, "kv_loaded_bytes": loaded}
