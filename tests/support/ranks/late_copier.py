"""Copies between simulated cells and host slots, each as late as the contract of KvMoves allows."""

from __future__ import annotations

from collections.abc import Sequence

from ep_server.records import KvLoad, KvMoves

Cell = tuple[str, int, int] | None  # (salt, token, position)


class LateCopier:
    """Blocks are empty until their load ends, so whoever reads one too early reads nothing."""

    def __init__(self, cells: list[Cell], block_size: int, host_blocks: int) -> None:
        self.slots: list[list[Cell]] = [[None] * block_size for _ in range(host_blocks)]
        self._cells, self._size = cells, block_size
        self._saves: list[tuple[int, int]] = []
        self._loads: list[KvLoad] = []
        self._ended: list[int] = []
        self.saved = self.loaded_blocks = 0

    def start(self, moves: KvMoves) -> None:
        """Copies of earlier plans end here only if the step or a load may write their blocks."""
        fresh = set(moves.fresh)
        self._saves += moves.saves
        self.saved += len(moves.saves)
        self.loaded_blocks += sum(len(load.copies) for load in moves.loads)
        if moves.loads or any(block in fresh for block, _ in self._saves):
            self._save()
        self._load([load for load in self._loads if any(block in fresh for block, _ in load.copies)])
        for load in moves.loads:
            for block, _ in load.copies:
                assert block in fresh
                self._fill(block, [None] * self._size)
        self._loads += moves.loads

    def loaded(self) -> list[int]:
        """Ends all loads. Returns: the tickets of those that ended since the last call."""
        self._load(list(self._loads))
        ended, self._ended = self._ended, []
        return ended

    def _save(self) -> None:
        for block, slot in self._saves:
            self.slots[slot] = self._cells[block * self._size : (block + 1) * self._size]
        self._saves.clear()

    def _load(self, loads: Sequence[KvLoad]) -> None:
        for load in loads:
            self._loads.remove(load)
            self._ended.append(load.ticket)
            for block, slot in load.copies:
                self._fill(block, self.slots[slot])

    def _fill(self, block: int, cells: list[Cell]) -> None:
        self._cells[block * self._size : (block + 1) * self._size] = cells
