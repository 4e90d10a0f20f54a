"""Moves of experts between slots while steps are in flight, and rows received by expert."""

from __future__ import annotations

import torch

from ep_server.backends.gpu.waiting import Reading
from ep_server.errors import InternalError
from ep_server.models.slots import ExpertRows, Held, Routes, SlotTable


class ExpertMoves:
    """Nothing waits for the device at a move: the counts up to it are read when they are needed next.

    table: None where experts stay. experts: of a layer. total: [layers, slots] rows received, cumulative.
    seconds: in which the steps in flight at a move end, after it.
    """

    def __init__(self, table: SlotTable | None, experts: int, total: torch.Tensor, seconds: float) -> None:
        self._table, self._experts, self._total, self._seconds = table, experts, total, seconds
        self._rows: ExpertRows | None = None
        self._last: tuple[Reading, Held] | None = None  # counts at the last move; what is held since

    def place(self, routes: Routes, held: Held) -> None:
        """See Runner. Raises: as rows()."""
        if self._table is None:
            raise InternalError("the experts of this rank cannot move")
        self.rows()
        self._table.set(routes)
        self._last = Reading(self._total), held

    def rows(self) -> ExpertRows | None:
        """Rows by expert, given counts from now on; None before the first place().

        Raises: InternalError if steps in flight at the last move do not end.
        """
        if self._last is not None:
            (counts, held), self._last = self._last, None
            if self._rows is None:
                self._rows = ExpertRows(self._experts, held)
            else:
                self._rows.moved(counts.result(self._seconds).numpy(), held)
        return self._rows
