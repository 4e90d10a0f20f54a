"""Decides on one rank whether it wants two micro-batches, from measured times.

Two micro-batches hide waiting for other ranks but read every weight twice, so they pay only where waiting is
a good part of a step, and then not always: it is tried and timed. Knows no clock and no exchange: it is given
durations. The vote makes one decision of all ranks' wishes. Units: steps, nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that ended. ns: it took. tokens: of this rank. bucket: of its graph, on all ranks; 0 = none."""

    ns: int
    tokens: int
    bucket: int = 0
    micro_batches: int = 1


class Overlap(Protocol):
    """One rank's wish, step by step. All ranks count the same steps."""

    def wish(self, sequences: int, bucket: int) -> bool:
        """Whether the next step may run two micro-batches; what this rank would run in it."""
        ...

    def stepped(self, step: Ran) -> bool:
        """Counts a step. True where read() is due."""
        ...

    def read(self, wait_ns: int, compute_ns: int) -> None:
        """Takes cumulative waiting for peers and computing time; called before the first step too."""
        ...


@dataclass(frozen=True, slots=True)
class OverlapRule:
    """A cycle is `window` single steps, `window` steps of trial, `hold` steps of what was decided.

    The trial takes place where waiting took more than `waiting` of the computing time in the single steps.
    It is won where its steps took less than `gain` of the single ones; while overlap is on, less than
    `keep` is enough, so that noise does not switch to and fro. Steps compare only if their tokens do, within
    a share of `similar`.
    """

    waiting: float = 0.5
    gain: float = 0.95
    keep: float = 1.0
    similar: float = 0.25
    window: int = 32
    hold: int = 960


class OverlapPolicy:
    """For steps of any size. mode: ParallelConfig.overlap: on, off or auto.

    All ranks count the same steps, so their windows and trials coincide.
    """

    def __init__(self, mode: str, rule: OverlapRule | None = None) -> None:
        self.mode = mode
        self.rule = rule or OverlapRule()
        self.wanted = mode == "on"
        self._at = 0  # step of the cycle
        self._trial = False
        self._ns = self._tokens = 0  # of the current window
        self._single = (0, 0)  # the same of the single window
        self._read = (0, 0)

    def __repr__(self) -> str:
        return f"OverlapPolicy({self.mode}, wanted={self.wanted}, step {self._at} of the cycle)"

    def wish(self, sequences: int, bucket: int) -> bool:
        """As Overlap.wish."""
        if self.mode != "auto":
            return self.wanted
        if self._at < self.rule.window:
            return False
        wanted = self._trial if self._at < 2 * self.rule.window else self.wanted
        return wanted and sequences != 1  # an idle rank does not keep the others from it

    def stepped(self, step: Ran) -> bool:
        """As Overlap.stepped; read() is due where the single window begins or ends."""
        if self.mode != "auto":
            return False
        window = self.rule.window
        if self._at < 2 * window:
            self._ns += step.ns
            self._tokens += step.tokens
        self._at += 1
        if self._at == 2 * window:
            self._decide()
        elif self._at == 2 * window + self.rule.hold:
            self._at = self._ns = self._tokens = 0
        return self._at in (0, window)

    def read(self, wait_ns: int, compute_ns: int) -> None:
        """As Overlap.read."""
        if self._at == self.rule.window:
            waited, computed = wait_ns - self._read[0], compute_ns - self._read[1]
            self._trial = waited > self.rule.waiting * computed
            self._single = (self._ns, self._tokens)
            self._ns = self._tokens = 0
        self._read = (wait_ns, compute_ns)

    def _decide(self) -> None:
        single_ns, single_tokens = self._single
        limit = self.rule.keep if self.wanted else self.rule.gain
        comparable = abs(self._tokens - single_tokens) <= self.rule.similar * single_tokens
        self.wanted = self._trial and comparable and self._ns < limit * single_ns


@dataclass(frozen=True, slots=True)
class BucketRule:
    """Of each bucket `window` steps are run as one micro-batch, as many as two, then `hold` as was faster.

    Two are faster where the median of their steps is less than `gain` of that of the others. Where two steps
    of a trial took more than `hopeless` of it, the rest of the trial is run as one. What is tried in vain
    then costs window / hold of what it is slower, or less.
    """

    window: int = 6
    hold: int = 1200
    gain: float = 0.99
    hopeless: float = 1.25


@dataclass(slots=True)
class _Trial:
    """Of one bucket. at: step of the cycle. times: ns, by micro-batches."""

    at: int
    wanted: bool
    times: dict[int, list[int]]


class BucketOverlap:
    """For captured steps: which form of a bucket is faster is measured on it, now and then.

    A rank does not know before the vote which bucket the others bring: it takes the larger of its own and
    the last one. An idle rank wishes as the others do.

    Args:
        buckets: that can be run either way; steps of others are one micro-batch.
    """

    def __init__(self, buckets: Iterable[int], rule: BucketRule | None = None) -> None:
        self.rule = rule or BucketRule()
        self._trials = {bucket: _Trial(0, False, {1: [], 2: []}) for bucket in buckets}
        self._last = 0

    def __repr__(self) -> str:
        wanted = sorted(bucket for bucket, trial in self._trials.items() if trial.wanted)
        return f"BucketOverlap(wanted={wanted}, of {sorted(self._trials)})"

    def wish(self, sequences: int, bucket: int) -> bool:
        """As Overlap.wish."""
        trial = self._trials.get(max(bucket, self._last))
        if trial is None or (sequences and not bucket):  # a step without a graph
            return False
        window = self.rule.window
        if trial.at >= 2 * window:
            return trial.wanted
        return trial.at >= window and not self._hopeless(trial)  # steps are counted on, as on all ranks

    def stepped(self, step: Ran) -> bool:
        """As Overlap.stepped; read() is never due."""
        trial = self._trials.get(step.bucket)
        self._last = step.bucket if trial is not None else 0  # chunks of prompts are another kind of step
        if trial is None:
            return False
        window = self.rule.window
        if trial.at < 2 * window:
            trial.times[step.micro_batches].append(step.ns)
        trial.at += 1
        if trial.at == 2 * window:
            self._decide(trial)
        elif trial.at == 2 * window + self.rule.hold:
            trial.at = 0
        return False

    def read(self, wait_ns: int, compute_ns: int) -> None:
        """As Overlap.read: the steps' own times say enough."""

    def _hopeless(self, trial: _Trial) -> bool:
        one, two = trial.times[1], trial.times[2]
        return bool(one) and len(two) > 1 and min(two) > self.rule.hopeless * median(one)

    def _decide(self, trial: _Trial) -> None:
        one, two = trial.times[1], trial.times[2]
        # Steps are launched before the last ones are counted, and others may refuse: some are the other kind.
        enough = min(len(one), len(two)) > self.rule.window // 2
        trial.wanted = enough and median(two) < self.rule.gain * median(one)
        trial.times = {1: [], 2: []}
