"""Decides on one rank whether it wants two micro-batches, from measured waiting against computing.

Knows no clock and no exchange: it is given durations. The vote makes one decision of all ranks' wishes.
Units: steps, nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlapRule:
    """When the overlap pays: two micro-batches read every weight twice, so waiting must be a good part.

    enter, leave: share of waiting for peers in the computing time of a step, above which two micro-batches
      are wanted, and below which no longer; apart, so that noise does not switch to and fro.
    window: single steps measured before a decision. hold: steps it then lasts before it is measured again.
    """

    enter: float = 0.5
    leave: float = 0.3
    window: int = 32
    hold: int = 480


class OverlapPolicy:
    """One rank's wish, step by step. mode: ParallelConfig.overlap: on, off or auto."""

    def __init__(self, mode: str, rule: OverlapRule | None = None) -> None:
        self.mode = mode
        self.rule = rule or OverlapRule()
        self.wanted = mode == "on"
        self._measured = 0
        self._held = 0

    def __repr__(self) -> str:
        return f"OverlapPolicy({self.mode}, wanted={self.wanted}, measured={self._measured})"

    @property
    def measuring(self) -> bool:
        """The next steps must be single ones: their waiting is what overlap could hide."""
        return self.mode == "auto" and self._held == 0

    def wish(self, sequences: int) -> bool:
        """Whether the next step may run two micro-batches; `sequences` that this rank would run in it."""
        if self.mode != "auto":
            return self.wanted
        return self.wanted and not self.measuring and sequences >= 2

    def stepped(self) -> bool:
        """Counts a step. True when a window of single steps is complete and decide() is due."""
        if self.mode != "auto":
            return False
        if self._held:
            self._held -= 1
            return False
        self._measured += 1
        return self._measured >= self.rule.window

    def decide(self, wait_ns: int, compute_ns: int) -> None:
        """Takes the waiting and computing time of the window; the decision holds for rule.hold steps."""
        share = wait_ns / compute_ns if compute_ns > 0 else 0.0
        self.wanted = share > (self.rule.leave if self.wanted else self.rule.enter)
        self._measured, self._held = 0, self.rule.hold
