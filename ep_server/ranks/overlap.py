"""Decides on one rank whether it wants two micro-batches, from measured times.

Two micro-batches hide waiting for other ranks but read every weight twice, so they pay only where waiting is
a good part of a step, and then not always: it is tried and timed. Knows no clock and no exchange: it is given
durations. The vote makes one decision of all ranks' wishes. Units: steps, nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """One rank's wish, step by step. mode: ParallelConfig.overlap: on, off or auto.

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

    def wish(self, sequences: int) -> bool:
        """Whether the next step may run two micro-batches; `sequences` that this rank would run in it."""
        if self.mode != "auto":
            return self.wanted
        if self._at < self.rule.window:
            return False
        wanted = self._trial if self._at < 2 * self.rule.window else self.wanted
        return wanted and sequences != 1  # an idle rank does not keep the others from it

    def stepped(self, step_ns: int, tokens: int) -> bool:
        """Counts a step of this rank. True where the single window begins or ends: read() is due."""
        if self.mode != "auto":
            return False
        window = self.rule.window
        if self._at < 2 * window:
            self._ns += step_ns
            self._tokens += tokens
        self._at += 1
        if self._at == 2 * window:
            self._decide()
        elif self._at == 2 * window + self.rule.hold:
            self._at = self._ns = self._tokens = 0
        return self._at in (0, window)

    def read(self, wait_ns: int, compute_ns: int) -> None:
        """Takes cumulative waiting for peers and computing time; called before the first step too."""
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
