"""How many prompt tokens a step may run beside streams, learned from the times of earlier steps.

A step without prompts has a base time, measured by its number of single tokens. What prompt tokens add is
modelled as `token + pair * context` per row: products cost the same for every row, attention as much as the
tokens it reads. The first part follows the latest steps, since it depends on their size: few rows are nearly
free where a step waits for weights. Pure: durations are passed in. Units: tokens, nanoseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ep_server.records import StepBatch
from ep_server.scheduler.batch import AUTO_BUDGET, SchedulerLimits
from ep_server.scheduler.sequence import NEVER, ScheduledSequence

AUTO_FACTOR = 1.85  # of the base time; 2 is what streams may notice, and predictions are a few percent off
MARGIN = 0.95  # of a configured budget
# Where the smallest steps with a prompt nearly fill the budget, as beside one stream, prompts would crawl.
# Then the budget is this multiple of such a step.
FULL, LEAST_FACTOR = 0.9, 1.5
GROWTH = 1.25  # rows of a step against those of earlier ones: the model need not hold far beyond them
LEAST_SHARE = 256  # of the largest step, which prompts get in any case
# Where no chunk keeps a configured budget, the only prompt runs one token in a step, as a stream does, if it
# has so few: a second turn behind a long history, say. Such steps do not show what chunks cost. So each
# lowers what they are thought to cost, and now and then a prompt runs a chunk again.
FEW, FORGET = 64, 0.998
BASE_WEIGHT, TOKEN_WEIGHT, PAIR_WEIGHT = 0.1, 0.4, 0.02  # of the latest step in each mean
OUTLIER = 4.0  # times what was expected: the host was busy


@dataclass(frozen=True, slots=True)
class RanStep:
    """A step that ended. ns: its duration. rows: of the rank with most, padding included.

    singles: single tokens of the rank that has the most; prompts: prompt tokens, likewise.
    """

    ns: int
    rows: int
    singles: int
    prompts: int


def prompt_tokens(batch: StepBatch) -> int:
    """Tokens of prompt chunks in a batch; a chunk of one token costs what a decoding sequence does."""
    if batch.num_tokens == len(batch.slices):
        return 0
    return sum(len(piece.token_ids) for piece in batch.slices if len(piece.token_ids) > 1)


@dataclass(slots=True)
class Room:
    """What is left of a step. tokens, ns: at most so many more. used: rows of the step so far.

    token, pair: cost of a row and of a pair. sizes: rows that steps are padded to, ascending; may be empty.
    slow: a prompt of up to FEW tokens runs them one by one.
    """

    tokens: int
    ns: float = math.inf
    used: int = 0
    token: float = 0.0
    pair: float = 0.0
    sizes: Sequence[int] = ()
    slow: bool = False

    def fit(self, start: int, whole: int) -> int:
        """Tokens that a prompt may run behind `start` computed ones; at least 1 if there is room at all.

        whole: tokens that it had to run when it began.
        """
        if self.slow and whole <= FEW:
            return min(self.tokens, 1)
        if self.ns == math.inf or not self.tokens:
            return self.tokens
        # pair / 2 * n^2 + (token + pair * start) * n = ns
        slope = self.token + self.pair * start
        root = math.sqrt(slope * slope + 2 * self.pair * max(self.ns, 0.0))
        count = min(self.tokens, int(2 * max(self.ns, 0.0) / max(slope + root, 1e-9)))
        at = bisect_right(self.sizes, self.used + count)
        if at and self.sizes[at - 1] > self.used:
            count = self.sizes[at - 1] - self.used
        return min(max(count, 1), self.tokens)

    def take(self, start: int, count: int) -> None:
        """A chunk of `count` tokens behind `start`. Ends the room if little time is left."""
        self.tokens -= count
        self.used += count
        if self.ns < math.inf:
            self.ns -= count * (self.token + self.pair * (start + count / 2))
            if self.ns < self.token:
                self.tokens = 0


class PromptBudget:
    """Learns what prompts cost and decides how much of a step they get."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._least = max(limits.block_size, limits.max_step_tokens // LEAST_SHARE)
        self._base: dict[int, float] = {}  # ns by size class of single tokens
        self._smallest: dict[int, float] = {}  # the same of small steps with a prompt
        self._token = 0.0  # ns of a row at the size of the latest steps
        self._means: tuple[float, float, float, float] | None = None  # context, cost, context^2, product
        self._recent = 0.0  # prompt rows beside streams, lately

    def __repr__(self) -> str:
        return f"PromptBudget(token={self._token:.0f}, pair={self._pair:.3f}, recent={self._recent:.0f})"

    def ran(self, step: RanStep, batch: StepBatch) -> None:
        """Learns from a step. batch: this rank's part of it."""
        if not step.singles:
            return
        if not step.prompts:
            _learn(self._base, step.singles, step.ns)
            return
        small = max([step.singles + self._least, *self.limits.step_sizes[:1]])
        if step.rows <= small:  # without what its context costs
            _learn(self._smallest, step.singles, step.ns - self._pair * _pairs(batch))
        base = _nearest(self._base, step.singles)
        if base is None:
            return
        rows = max(step.rows - step.singles, 1)
        cost, context = max(step.ns - base, 0.0) / rows, _pairs(batch) / rows
        if self._means is not None:
            cost = min(cost, OUTLIER * (self._token + self._pair * context) + base / rows)
        self._learn(cost, context)
        self._recent = max(rows, 0.9 * self._recent)

    def room(
        self,
        going: Sequence[ScheduledSequence],
        first: ScheduledSequence | None,
        prompts: int,
        elsewhere: int,
    ) -> tuple[int, Room]:
        """What prompts get of a step.

        With a budget from measured times, a stream is not to be held up by prompts that arrived after it had
        begun, unless more prompts wait than there are such streams. A prompt that continues a stream is free.

        Args:
            going: sequences that decode in it. first: the prompt that runs first, if any. prompts: that could
              run.
            elsewhere: streams of other ranks that should not be held up.
        Returns: streams of this rank that should not be held up, and the room.
        """
        asked, singles = self.limits.itl_budget_ns, len(going)
        measured = asked == AUTO_BUDGET
        since = first.since if measured and first is not None else NEVER
        streams = sum(seq.began < since for seq in going)
        held_up = streams + elsewhere
        free = measured and (held_up < prompts or (first is not None and first.continues))
        if not asked or not held_up or free:
            return streams, Room(self.limits.max_step_tokens - singles)
        return streams, self._beside_streams(singles, alone=prompts == 1)

    def _beside_streams(self, singles: int, *, alone: bool) -> Room:
        left, asked = self.limits.max_step_tokens - singles, self.limits.itl_budget_ns
        least, base = min(left, self._least), _nearest(self._base, max(singles, 1))
        most = min(left, max(least, self._grown(singles)))
        if self._means is None or base is None:
            return Room(most)
        spare = MARGIN * asked - base
        if asked == AUTO_BUDGET:
            whole, smallest = AUTO_FACTOR * base, _nearest(self._smallest, max(singles, 1)) or 0.0
            spare = (whole if smallest < FULL * whole else LEAST_FACTOR * smallest) - base
        if spare < least * self._token:  # prompts must go on, however slowly
            slow = alone and asked != AUTO_BUDGET
            if slow:
                self._token *= FORGET
            return Room(least, slow=slow)
        return Room(most, spare, singles, self._token, self._pair, self.limits.step_sizes)

    def _grown(self, singles: int) -> int:
        """Prompt rows of a step that is one size larger than earlier ones."""
        rows, sizes = singles + int(self._recent), self.limits.step_sizes
        at = bisect_right(sizes, rows)
        return max(int(GROWTH * self._recent), sizes[at] - singles if at < len(sizes) else 0)

    @property
    def _pair(self) -> float:
        """ns of a row for each token that it attends to."""
        if self._means is None:
            return 0.0
        context, cost, square, product = self._means
        spread = square - context * context
        if spread <= 0.01 * square:  # contexts were all alike
            return 0.0
        return min(max((product - context * cost) / spread, 0.0), cost / max(context, 1.0))

    def _learn(self, cost: float, context: float) -> None:
        seen = (context, cost, context * context, context * cost)
        if self._means is None:
            self._means, self._token = seen, cost
            return
        means = [_mean(old, new, PAIR_WEIGHT) for old, new in zip(self._means, seen, strict=True)]
        self._means = means[0], means[1], means[2], means[3]
        self._token = max(_mean(self._token, cost - self._pair * context, TOKEN_WEIGHT), 1.0)


def _pairs(batch: StepBatch) -> float:
    """Pairs of a prompt token and one that it attends to."""
    sizes = ((piece.start, len(piece.token_ids)) for piece in batch.slices)
    return sum(count * (start + (count + 1) / 2) for start, count in sizes if count > 1)


def _mean(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)


def _learn(table: dict[int, float], tokens: int, ns: float) -> None:
    """Adds a step to the mean of its size."""
    key = _size_class(tokens)
    table[key] = _mean(table.get(key, ns), ns, BASE_WEIGHT)


def _nearest(table: dict[int, float], tokens: int) -> float | None:
    """The mean of the nearest size; None if there is none."""
    wanted = _size_class(tokens)
    return table[min(table, key=lambda key: (abs(key - wanted), key))] if table else None


def _size_class(tokens: int) -> int:
    """Four classes between a power of two and the next."""
    return round(4 * math.log2(tokens))
