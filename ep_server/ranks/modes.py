"""Decides which steps use the exchange of many rows: from how many tokens per rank on it takes less time.

Ranks time both ways when they start, together and at several sizes, and agree on the slowest rank's times.
A rank that joins them later has nobody to time with, so its vote is zero, and it learns what the others know.
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


def measure(
    time_pair: TimePair, gather: Gather, most: int, note: Note = lambda text: None, rule: ModeRule = RULE
) -> int:
    """Tokens from which many rows are faster, or NEVER; the same number on all ranks. Collective.

    Args:
        gather: of all ranks' records, empty for an absent one. most: tokens of the largest step.
        note: gets a line that says what was found.
    """
    start, table = NEVER, []
    for size in rule.sizes(most):
        times: tuple[list[int], list[int]] = ([], [])
        for turn in range(2 * rule.rounds + 2):
            took = time_pair(turn % 2 == 1, size)
            if turn >= 2:  # the first of each warms up
                times[turn % 2].append(took)
        mine = _TIMES.pack(*(int(median(each)) for each in times))
        of_ranks = [_TIMES.unpack(record) for record in gather(mine) if record]
        few, many = (max(column) for column in zip(*of_ranks, strict=True))
        start = NEVER if many >= rule.gain * few else min(start, size)
        table.append(f"{size}: {few / 1000:.0f} / {many / 1000:.0f}")
    begin = "never" if start == NEVER else f"from {start} tokens of a rank"
    note(f"steps use the exchange of many rows {begin}; low latency / many rows, us: {', '.join(table)}")
    return start


class ExchangeModes:
    """What one rank knows, and what its steps used.

    known: tokens from which steps use the exchange of many rows, ALWAYS or NEVER; 0 = the others decide.

    Args:
        undivided: only steps of one micro-batch do.
    """

    def __init__(self, known: int = NEVER, *, undivided: bool = False) -> None:
        self.known, self._undivided = known, undivided
        self._steps = 0

    def __repr__(self) -> str:
        return f"ExchangeModes(from={self.known})"

    def possible(self, rows: int) -> tuple[bool, ...]:
        """How steps of so many rows may run: whether with the exchange of many rows; maybe either way."""
        return (rows >= self.known,) if self.known else (False, True)

    def chosen(self, verdict: Verdict, bucket: int, micro_batches: int) -> bool:
        """Whether the step that was voted on uses the exchange of many rows. bucket: of its graph."""
        self.known = self.known or verdict.normal_from
        normal = verdict.normal(bucket, micro_batches) and (micro_batches == 1 or not self._undivided)
        self._steps += normal
        return normal

    def counters(self) -> dict[str, int]:
        """Steps with many rows, and from how many tokens on; 0 = never."""
        begin = self.known if self.known < NEVER else 0
        return {"normal_steps": self._steps, "normal_from": begin}
