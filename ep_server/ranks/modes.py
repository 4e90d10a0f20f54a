"""Decides which steps use the exchange of many rows: from how many tokens per rank on it takes less time.

Ranks time both ways when they start, together and at several sizes, and agree on the slowest rank's times.
A rank that starts alone, or joins others, has nobody to time with, so its vote is zero. It learns what the
others know. Where none of several ranks knows, they measure between their steps, one turn at a time.
Pure: callers measure. Units: tokens of the rank with most, nanoseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ep_server.ranks.vote import Verdict

NEVER = 2**32 - 1  # more tokens than a step can have
ALWAYS = 1
_TIMES = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class ModeRule:
    """Sizes are powers of two from `least`, and the largest step. Each is timed `rounds` times in both ways.

    Many rows win a size if their median takes less than `gain` of the other's. They are used from the
    smallest size on that they win together with all larger ones.
    """

    least: int = 16
    rounds: int = 5
    gain: float = 0.98

    def sizes(self, most: int) -> list[int]:
        """To be timed, ascending."""
        powers = [1 << power for power in range(most.bit_length()) if self.least <= 1 << power < most]
        return [*powers, most]


TimePair = Callable[[bool, int], int]  # of a dispatch and its combine: (many rows, tokens of each rank) -> ns
Gather = Callable[[bytes], Sequence[bytes]]
Note = Callable[[str], None]
RULE = ModeRule()


class Measurement:
    """One turn after the other, each of both ways once. Collective: all ranks take the same turns.

    found: tokens from which many rows are faster, or NEVER; the same on all ranks. 0 until the last turn.

    Args:
        gather: of all ranks' records, empty for an absent one. most: tokens of the largest step.
        note: gets a line that says what was found.
    """

    def __init__(
        self,
        time_pair: TimePair,
        gather: Gather,
        most: int,
        note: Note = lambda text: None,
        rule: ModeRule = RULE,
    ) -> None:
        self.found = 0
        self._time_pair, self._gather, self._note, self._rule = time_pair, gather, note, rule
        self._sizes = rule.sizes(most)
        self._times: tuple[list[int], list[int]] = ([], [])
        self._turns, self._start, self._table = 0, NEVER, list[str]()

    def turn(self) -> None:
        """At the next size after `rounds` and a first one that warms up. Raises: ExchangeError."""
        took = [self._time_pair(many, self._sizes[0]) for many in (False, True)]
        if self._turns:
            for times, each in zip(self._times, took, strict=True):
                times.append(each)
        self._turns += 1
        if self._turns > self._rule.rounds:
            self._end_size(self._sizes.pop(0))

    def _end_size(self, size: int) -> None:
        mine = _TIMES.pack(*(int(median(each)) for each in self._times))
        self._turns, self._times = 0, ([], [])
        of_ranks = [_TIMES.unpack(record) for record in self._gather(mine) if record]
        few, many = (max(column) for column in zip(*of_ranks, strict=True))
        self._start = NEVER if many >= self._rule.gain * few else min(self._start, size)
        self._table.append(f"{size}: {few / 1000:.0f} / {many / 1000:.0f}")
        if self._sizes:
            return
        self.found = self._start
        begin = "never" if self.found == NEVER else f"from {self.found} tokens of a rank"
        times = ", ".join(self._table)
        self._note(f"steps use the exchange of many rows {begin}; low latency / many rows, us: {times}")


def measure(measurement: Measurement) -> int:
    """Takes all turns. Returns: what was found. Raises: as Measurement.turn()."""
    while not measurement.found:
        measurement.turn()
    return measurement.found


class ExchangeModes:
    """What one rank knows, and what its steps used.

    known: tokens from which steps use the exchange of many rows, ALWAYS or NEVER; 0 = the others decide.
    due: no rank of several knows, so all of them call turn() before the next step.

    Args:
        undivided: only steps of one micro-batch do.
        late: begins a measurement among the ranks that run; collective. None: it cannot be made up for.
    """

    def __init__(
        self,
        known: int = NEVER,
        *,
        undivided: bool = False,
        late: Callable[[], Measurement] | None = None,
    ) -> None:
        self.known, self._undivided, self._late = known, undivided, late
        self.due = False
        self._measurement: Measurement | None = None
        self._steps = 0

    def __repr__(self) -> str:
        return f"ExchangeModes(from={self.known})"

    def possible(self, rows: int) -> tuple[bool, ...]:
        """How steps of so many rows may run: whether with the exchange of many rows; maybe either way."""
        return (rows >= self.known,) if self.known else (False, True)

    def chosen(self, verdict: Verdict, bucket: int, micro_batches: int) -> bool:
        """Whether the step that was voted on uses the exchange of many rows. bucket: of its graph."""
        self.known = self.known or verdict.normal_from
        self.due = not self.known and self._late is not None and len(verdict.tokens) > 1
        normal = verdict.normal(bucket, micro_batches) and (micro_batches == 1 or not self._undivided)
        self._steps += normal
        return normal

    def turn(self) -> None:
        """Measures a little more, while no step is in flight. Collective. Raises: ExchangeError."""
        assert self._late is not None
        if self._measurement is None:
            self._measurement = self._late()
        self._measurement.turn()
        self.due, self.known = False, self._measurement.found
        if self.known:
            self._measurement = None

    def regrouped(self) -> None:
        """Other ranks take part: what was measured so far is not of them."""
        self.due, self._measurement = False, None

    def counters(self) -> dict[str, int]:
        """Steps with many rows, and from how many tokens on; 0 = never."""
        begin = self.known if self.known < NEVER else 0
        return {"normal_steps": self._steps, "normal_from": begin}
