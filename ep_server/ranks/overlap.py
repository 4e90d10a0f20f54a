"""Decides on one rank whether a step should run as two micro-batches, from measured times.

Two micro-batches hide the wait for other ranks but read every weight twice. They pay only where waiting is a
large part of a step, and not always then, so both ways are tried and timed. The vote combines the ranks'
preferences. Pure: callers pass durations in. Units: steps, nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished step. ns: its duration. tokens: on this rank. bucket: of its graph; 0 = none."""

    ns: int
    tokens: int
    bucket: int = 0
    micro_batches: int = 1


class Overlap(Protocol):
    """One rank's preference, step by step. All ranks count the same steps."""

    def wants_two(self, sequences: int, bucket: int) -> bool:
        """Whether this rank agrees to two micro-batches in the next step, with `sequences` and `bucket`."""
        ...

    def stepped(self, step: Ran) -> bool:
        """Counts a step. Returns True when the caller must call read()."""
        ...

    def read(self, wait_ns: int, compute_ns: int) -> None:
        """Takes the cumulative times of waiting and computing; also called before the first step."""
        ...


@dataclass(frozen=True, slots=True)
class OverlapRule:
    """A cycle is `window` single steps, `window` trial steps, then `hold` steps as decided.

    The trial runs if waiting exceeded `waiting` times the computing time in the single steps. Two
    micro-batches win if the trial took less than `gain` of the single steps' time, or less than `keep`
    while overlap is already on: the hysteresis keeps noise from toggling it. Windows are compared only if
    their token counts differ by at most the share `similar`.
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

    def wants_two(self, sequences: int, bucket: int) -> bool:
        """As Overlap.wants_two."""
        if self.mode != "auto":
            return self.wanted
        if self._at < self.rule.window:
            return False
        wanted = self._trial if self._at < 2 * self.rule.window else self.wanted
        return wanted and sequences != 1  # an idle rank does not block the others

    def stepped(self, step: Ran) -> bool:
        """As Overlap.stepped; read() is due when the single window begins or ends."""
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
    """Each bucket runs `window` steps as one micro-batch, `window` as two, then `hold` in the faster way.

    Two win if their median step takes less than `gain` of the other median. If two trial steps both took
    more than `hopeless` times that median, the rest of the trial runs as one. A failed trial therefore
    costs at most window / hold of the slowdown.
    """

    window: int = 6
    hold: int = 1200
    gain: float = 0.99
    hopeless: float = 1.25


@dataclass(slots=True)
class _Trial:
    """One bucket's trial. at: step of the cycle. times: ns, by number of micro-batches."""

    at: int
    wanted: bool
    times: dict[int, list[int]]


class BucketOverlap:
    """For captured steps: measures from time to time which way a bucket runs faster.

    Before the vote a rank does not know the other ranks' bucket, so it assumes the larger of its own and
    the last one. An idle rank votes as the others do.

    Args:
        buckets: those captured both ways; steps of other buckets run as one micro-batch.
    """

    def __init__(self, buckets: Iterable[int], rule: BucketRule | None = None) -> None:
        self.rule = rule or BucketRule()
        self._trials = {bucket: _Trial(0, False, {1: [], 2: []}) for bucket in buckets}
        self._last = 0

    def __repr__(self) -> str:
        wanted = sorted(bucket for bucket, trial in self._trials.items() if trial.wanted)
        return f"BucketOverlap(wanted={wanted}, of {sorted(self._trials)})"

    def wants_two(self, sequences: int, bucket: int) -> bool:
        """As Overlap.wants_two."""
        trial = self._trials.get(max(bucket, self._last))
        if trial is None or (sequences and not bucket):  # a step without a graph
            return False
        window = self.rule.window
        if trial.at >= 2 * window:
            return trial.wanted
        return trial.at >= window and not self._hopeless(trial)  # counted on, as on all ranks

    def stepped(self, step: Ran) -> bool:
        """As Overlap.stepped; read() is never due."""
        trial = self._trials.get(step.bucket)
        self._last = step.bucket if trial is not None else 0  # prompt chunks are a different kind of step
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
        """As Overlap.read; unused: the steps' own times suffice."""

    def _hopeless(self, trial: _Trial) -> bool:
        one, two = trial.times[1], trial.times[2]
        return bool(one) and len(two) > 1 and min(two) > self.rule.hopeless * median(one)

    def _decide(self, trial: _Trial) -> None:
        one, two = trial.times[1], trial.times[2]
        # Ranks run ahead and others may refuse, so some steps of a window ran the other way.
        enough = min(len(one), len(two)) > self.rule.window // 2
        trial.wanted = enough and median(two) < self.rule.gain * median(one)
        trial.times = {1: [], 2: []}
