"""The block tables of sequences, kept on the host from step to step: a step converts only what is new.

Knows slices; nothing of the device. Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ep_server.errors import InternalError
from ep_server.records import SeqSlice


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the S slices of a step stand, in tokens: [S] int64 starts, sizes; ends = starts + sizes.

    numbers: of their requests. singles: how many run one token. rows: [T] int64, which slice a row is of.
    positions: [T] int64.
    """

    numbers: list[int]
    singles: int
    starts: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray
    rows: np.ndarray
    positions: np.ndarray

    @staticmethod
    def of(slices: Sequence[SeqSlice]) -> Spans:
        """Reads the slices."""
        starts = np.array([piece.start for piece in slices], dtype=np.int64)
        sizes = np.array([len(piece.token_ids) for piece in slices], dtype=np.int64)
        numbers, ends = [piece.number for piece in slices], starts + sizes
        singles = int((sizes == 1).sum())
        rows, positions = np.arange(len(sizes)), starts
        if len(sizes) and sizes.max() > 1:
            rows, firsts = np.repeat(rows, sizes), sizes.cumsum() - sizes
            positions = np.arange(len(rows)) + (starts - firsts)[rows]
        return Spans(numbers, singles, starts, sizes, ends, rows, positions)


class BlockTables:
    """A row for each of the last sequences. One thread uses it.

    Args:
        sequences: most of a step. width: blocks of the longest context. block_size: tokens.
    """

    def __init__(self, sequences: int, width: int, block_size: int) -> None:
        self._store = np.zeros((sequences, width), dtype=np.int32)
        self._size = block_size
        self._row_of: dict[int, int] = {}  # by request
        self._free = list(range(sequences))
        self._last: tuple[list[int], np.ndarray] = ([], np.zeros(0, dtype=np.int64))
        self._admission, self._end, self._held = (np.full(sequences, -1, dtype=np.int64) for _ in range(3))

    def of(self, slices: Sequence[SeqSlice], spans: Spans) -> np.ndarray:
        """[S, most blocks of any slice] int32; beyond a slice's own blocks anything.

        Raises: InternalError for a slice beyond the width, or with too few blocks.
        """
        held = -(-spans.ends // self._size)
        given = np.array([len(piece.blocks) for piece in slices], dtype=np.int64)
        for index in np.flatnonzero((held > self._store.shape[1]) | (given < held)).tolist():
            piece = slices[index]
            raise InternalError(
                f"request {piece.number}: {spans.ends[index]} tokens in {len(piece.blocks)} blocks"
            )
        rows = self._rows(spans.numbers)
        admissions = np.array([piece.admission for piece in slices], dtype=np.int64)
        # Of one that goes on where it stopped the blocks are those it had, and perhaps more.
        goes_on = (self._admission[rows] == admissions) & (self._end[rows] == spans.starts)
        known = np.where(goes_on, self._held[rows], 0)
        for at in np.flatnonzero(known < held).tolist():
            first, last = int(known[at]), int(held[at])
            self._store[rows[at], first:last] = slices[at].blocks[first:last]
        self._admission[rows], self._end[rows] = admissions, spans.ends
        self._held[rows] = np.maximum(known, held)
        return self._store[rows, : int(held.max(initial=0))]

    def _rows(self, numbers: list[int]) -> np.ndarray:
        if numbers == self._last[0]:
            return self._last[1]
        row_of = self._row_of
        new = [number for number in numbers if number not in row_of]
        if len(new) > len(self._free):
            present = set(numbers)
            gone = [number for number in row_of if number not in present]
            self._free += [row_of.pop(number) for number in gone]
        for number in new:
            row_of[number] = self._free.pop()
            self._admission[row_of[number]] = -1
        self._last = (numbers, np.array([row_of[number] for number in numbers], dtype=np.int64))
        return self._last[1]
