"""Waiting queue of a rank: priority, then size, then arrival, without starvation.

It keeps the order; the scheduler decides whether the head fits. No request overtakes a head that does not
fit, so small requests do not starve a large one. The oldest request lets at most `max_overtakes` later ones
pass, so high priorities and short prompts do not starve it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from ep_server.errors import InternalError
from ep_server.scheduler.sequence import ScheduledSequence


def _order(seq: ScheduledSequence) -> tuple[bool, int, int, int]:
    return seq.order


def _arrival(seq: ScheduledSequence) -> int:
    return seq.arrival


def overtake(begun: list[ScheduledSequence], by: ScheduledSequence, most: int) -> None:
    """Counts `by` against the oldest of those with prompts half run, as take() does for those that wait.

    Args:
        begun: best first. most: later sequences that may pass one.
    """
    oldest = min(begun, key=_arrival, default=by)
    if oldest.arrival < by.arrival and not oldest.urgent:
        oldest.overtaken += 1
        if oldest.overtaken >= most:
            oldest.urgent = True
            begun.sort(key=_order)


class WaitingQueue:
    """Sequences in QUEUED or PREEMPTED, best first. A preempted one returns to its old place."""

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._by_order: list[ScheduledSequence] = []
        self._by_arrival: list[ScheduledSequence] = []

    def __len__(self) -> int:
        return len(self._by_order)

    def __repr__(self) -> str:
        return f"WaitingQueue({len(self)})"

    @property
    def head(self) -> ScheduledSequence | None:
        """The next sequence; None when empty."""
        return self._by_order[0] if self._by_order else None

    def candidate(self, *, continuing: bool) -> ScheduledSequence | None:
        """The head. continuing: None unless it continues a stream after a loss."""
        head = self.head
        return None if head is None or (continuing and not head.continues) else head

    @property
    def first(self) -> list[ScheduledSequence]:
        """The head, if there is one."""
        return self._by_order[:1]

    def push(self, seq: ScheduledSequence) -> None:
        """Inserts a sequence at its place."""
        insort(self._by_order, seq, key=_order)
        insort(self._by_arrival, seq, key=_arrival)

    def remove(self, seq: ScheduledSequence) -> None:
        """Removes a sequence from any place. Raises InternalError if it is not here."""
        at, age = (
            bisect_left(self._by_order, seq.order, key=_order),
            bisect_left(self._by_arrival, seq.arrival, key=_arrival),
        )
        if at == len(self._by_order) or self._by_order[at] is not seq:
            raise InternalError(f"{seq!r} is not in the waiting queue")
        del self._by_order[at], self._by_arrival[age]

    def take(self) -> ScheduledSequence:
        """Removes and returns the head; counts against the oldest one if the head came later."""
        seq = self._by_order[0]
        self.remove(seq)
        oldest = self._by_arrival[0] if self._by_arrival else seq
        if oldest.arrival < seq.arrival and not oldest.urgent:
            oldest.overtaken += 1
            if oldest.overtaken >= self._max_overtakes:
                self.remove(oldest)
                oldest.urgent = True
                self.push(oldest)
        return seq

    def refuse(self) -> None:
        """The head does not fit: no later sequence of its priority passes it until it does."""
        seq = self._by_order[0]
        if not seq.refused:
            self.remove(seq)
            seq.refused = True
            self.push(seq)

    def check_integrity(self) -> None:
        """Raises InternalError if an order is broken or a sequence here does not wait."""
        orders = [seq.order for seq in self._by_order]
        arrivals = [seq.arrival for seq in self._by_arrival]
        if orders != sorted(orders) or arrivals != sorted(arrivals):
            raise InternalError("the waiting queue is out of order")
        if {seq.number for seq in self._by_order} != {seq.number for seq in self._by_arrival}:
            raise InternalError("the two orders of the waiting queue hold different sequences")
        for seq in self._by_order:
            if not seq.waits or seq.blocks or seq.computed or seq.capacity or seq.sealed:
                raise InternalError(f"{seq!r} is in the waiting queue")
