"""Decides whether a step should run as two micro-batches, from measured times of both ways.

Two micro-batches hide the wait for other ranks but read every weight twice. What is faster depends on the
number of tokens, so it is measured for each bucket. The lowest rank that serves measures and decides by its
vote, and the others agree: a step takes equally long on all. Pure: callers pass durations in. Units: steps,
nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished step. ns: its duration. tokens: of the rank with most. bucket: of its graph; 0 = none."""

    ns: int
    tokens: int
    bucket: int = 0
    micro_batches: int = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """This rank's part of the next step. bucket: of the graph that it could replay; 0 = none."""

    sequences: int
    tokens: int
    bucket: int = 0


class Overlap(Protocol):
    """One rank's preference, step by step. The ranks run two micro-batches if all agree."""

    def wants_two(self, step: Planned) -> bool:
        """Whether this rank agrees to two micro-batches in the next step."""
        ...

    def stepped(self, step: Ran) -> None:
        """Counts a step."""
        ...

    def lead(self, *, leads: bool) -> None:
        """Whether this rank is the lowest one that serves, from the next step on."""
        ...


@dataclass(frozen=True, slots=True)
class FixedOverlap:
    """Always the same: overlap = on or off."""

    two: bool

    def wants_two(self, step: Planned) -> bool:
        """As Overlap.wants_two."""
        return self.two

    def stepped(self, step: Ran) -> None:
        """As Overlap.stepped."""

    def lead(self, *, leads: bool) -> None:
        """As Overlap.lead."""


@dataclass(frozen=True, slots=True)
class OverlapRule:
    """A trial of 2 * window steps, two steps of each way in turns; then some steps in the faster way.

    Two, because every second step may be longer: behind a slow network the ranks take turns to be late.

    Those are `first` steps, and twice as many as before, at most `hold`, after each trial that says the same
    again. So what a disturbed trial says does not last.

    The other way wins if its median step takes less than `gain` of the median in the present way: the
    hysteresis. If the first `least` trial steps of one way all took more than `hopeless` times the median of
    the other way, the rest of the trial runs the other way, and `hold` steps follow. A trial costs at most
    window / first of the difference, and in the end window / hold.
    """

    window: int = 12
    first: int = 150
    hold: int = 1200
    least: int = 4
    gain: float = 0.99
    hopeless: float = 1.25


@dataclass(slots=True)
class _Trial:
    """A bucket's trial. at: step of the cycle. hold: steps behind it. times: ns, by micro-batches."""

    at: int = 0
    hold: int = 0
    wanted: bool = False
    times: dict[int, list[int]] = field(default_factory=lambda: {1: [], 2: []})


class MeasuredOverlap:
    """overlap = auto: the rank that leads measures from time to time which way a bucket runs faster.

    The others agree, but to steps that need a graph and have none. One that begins to lead has measured
    nothing.

    Before the vote, a rank does not know how much the others plan. It assumes the larger of its own bucket
    and the last one. An idle rank votes as the last bucket says.

    Args:
        graphs: buckets captured both ways, where steps replay graphs; other steps run as one micro-batch.
          None = steps of any size can be split, and a bucket is a power of two of the largest rank's tokens.
    """

    def __init__(self, graphs: Iterable[int] | None = None, rule: OverlapRule | None = None) -> None:
        self.rule = rule or OverlapRule()
        self._any_size = graphs is None
        self._trials = {bucket: _Trial() for bucket in graphs or ()}
        self._last = 0
        self._leads = True

    def __repr__(self) -> str:
        wanted = sorted(bucket for bucket, trial in self._trials.items() if trial.wanted)
        return f"MeasuredOverlap(wanted={wanted}, of {sorted(self._trials)})"

    def wants_two(self, step: Planned) -> bool:
        """As Overlap.wants_two."""
        bucket = bucket_of(step.tokens) if self._any_size else step.bucket
        if step.sequences and not bucket:  # a step without a graph
            return False
        if not self._leads:
            return True
        trial = self._trials.get(max(bucket, self._last))
        if trial is None:
            return False
        if trial.at >= 2 * self.rule.window:
            return trial.wanted
        hopeless = self._hopeless(trial)
        return trial.at // 2 % 2 == 1 if hopeless == 0 else hopeless == 1

    def stepped(self, step: Ran) -> None:
        """As Overlap.stepped."""
        if not self._leads:
            return
        bucket = bucket_of(step.tokens) if self._any_size else step.bucket
        if self._any_size:
            self._trials.setdefault(bucket, _Trial())
        trial = self._trials.get(bucket)
        self._last = bucket if trial is not None else 0  # prompt chunks are a different kind of step
        if trial is None:
            return
        if trial.at < 2 * self.rule.window:
            trial.times[step.micro_batches].append(step.ns)
        trial.at += 1
        if trial.at == 2 * self.rule.window:
            self._decide(trial)
        elif trial.at == 2 * self.rule.window + trial.hold:
            trial.at, trial.times = 0, {1: [], 2: []}

    def lead(self, *, leads: bool) -> None:
        """As Overlap.lead."""
        if leads and not self._leads:
            self._trials, self._last = {bucket: _Trial() for bucket in self._trials}, 0
        self._leads = leads

    def _hopeless(self, trial: _Trial) -> int:
        """The number of micro-batches that is clearly slower; 0 = neither."""
        for slow, fast in ((1, 2), (2, 1)):
            times, others = trial.times[slow], trial.times[fast]
            enough = min(len(times), len(others)) >= self.rule.least
            if enough and min(times) > self.rule.hopeless * median(others):
                return slow
        return 0

    def _decide(self, trial: _Trial) -> None:
        one, two, before = trial.times[1], trial.times[2], trial.wanted
        hopeless = self._hopeless(trial)
        # Ranks run ahead and others may refuse, so some steps of a trial ran the other way.
        if hopeless:
            trial.wanted = hopeless == 1
        elif min(len(one), len(two)) <= self.rule.window // 2:
            trial.wanted = False
        elif trial.wanted:
            trial.wanted = not median(one) < self.rule.gain * median(two)
        else:
            trial.wanted = median(two) < self.rule.gain * median(one)
        longer = 2 * trial.hold if trial.wanted == before else 0
        trial.hold = self.rule.hold if hopeless else min(max(longer, self.rule.first), self.rule.hold)


def bucket_of(tokens: int) -> int:
    """The smallest power of two that is not below `tokens`; 0 for none."""
    return 1 << (tokens - 1).bit_length() if tokens else 0
