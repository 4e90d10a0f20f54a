"""The steps of a rank that were planned and not committed yet, oldest first. Knows their order only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ep_server.errors import InternalError
from ep_server.records import SampledToken, StepBatch
from ep_server.scheduler.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Step:
    """One planned batch. members: the sequence of each slice, and how often it had been admitted then."""

    batch: StepBatch
    members: tuple[tuple[ScheduledSequence, int], ...]


class StepsInFlight:
    """At most `ahead` + 1 steps, and as many idle ones, which need not be committed."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._steps: deque[Step] = deque()

    def make_room(self) -> None:
        """Before another step is planned. Raises InternalError if one must be committed first."""
        idle = list(takewhile(lambda step: not step.batch.slices, reversed(self._steps)))
        for _ in idle[self._ahead :]:
            self._steps.pop()
        if sum(bool(step.batch.slices) for step in self._steps) > self._ahead:
            raise InternalError("plan() before the last batch was committed")

    def push(self, batch: StepBatch, members: Sequence[ScheduledSequence]) -> None:
        """Adds the step that was planned last."""
        self._steps.append(Step(batch, tuple((seq, seq.admissions) for seq in members)))

    def pop(self, batch: StepBatch, sampled: Sequence[SampledToken]) -> Step:
        """Takes the oldest step out.

        Raises: InternalError if that is not `batch`, or the tokens are not its own; nothing has changed then.
        """
        while batch.slices and self._steps and not self._steps[0].batch.slices:
            self._steps.popleft()  # idle, and nobody committed it
        if not self._steps or batch is not self._steps[0].batch:
            raise InternalError("commit() of a batch that is not in flight")
        awaited, given = [s.number for s in batch.slices if s.sample], [token.number for token in sampled]
        if given != awaited:
            raise InternalError(f"commit() of tokens for requests {given}, awaited for {awaited}")
        return self._steps.popleft()

    def __contains__(self, seq: ScheduledSequence) -> bool:
        return any(seq is member for step in self._steps for member, _ in step.members)
