"""One admitted request in the server process: state, deadline, counts and times.

Units: seconds of the engine's clock, tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ep_server.engine.admission import Asked
from ep_server.engine.observer import RequestSummary
from ep_server.engine.stream import Completion, TokenStream
from ep_server.errors import EpServerError
from ep_server.records import FinishReason, PromptLogprobs, Request, TokenEvent
from ep_server.scheduler.lifecycle import State
from ep_server.text.detokenizer import OutputText

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submission:
    """What the service hands to the engine. timeout: seconds until DEADLINE_EXCEEDED, None = never.

    text: None where the caller wants no text and gave no stop strings. traceparent: for the log, "" = none.
    near: ranks of the node that was called; empty where all are alike.
    end_call: ends the call with an error, even if its caller does not read.
    """

    request: Request
    text: OutputText | None = None
    stream_interval: int = 1
    timeout: float | None = None
    traceparent: str = ""
    near: range = range(0)
    end_call: Callable[[EpServerError], None] = lambda _: None


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """An admitted request until its KV blocks are free."""

    request: Request
    rank: int
    text: OutputText | None
    stream: TokenStream
    admitted_at: float
    traceparent: str = ""
    end_call: Callable[[EpServerError], None] = lambda _: None
    state: State = State.QUEUED
    submitted: bool = False  # its rank has it
    timer: asyncio.TimerHandle | None = None
    deadline: float | None = None
    cancelled_at: float | None = None  # a cancel was sent; its blocks are not free yet
    output_tokens: int = 0
    output: list[int] = field(default_factory=list)  # tokens of the output; a new group of ranks gets them
    scored: int = 0  # prompt positions whose log probabilities are delivered
    begun: bool = False  # its rank has computed a part of it
    losses: int = 0  # of ranks, since its last token
    suspected: int = 0  # of these: losses of ranks that had begun to compute it, or were adding it
    cached_tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    max_gap: float = 0.0
    queued: float = 0.0  # time in its rank's queue

    def unseen(self, scored: PromptLogprobs) -> PromptLogprobs | None:
        """What of it was not delivered before: a new group of ranks scores the prompt again."""
        seen, end = max(self.scored - scored.start, 0), scored.start + len(scored.logprobs)
        if end <= self.scored:
            return None
        self.scored, top = end, seen * scored.top
        return replace(
            scored,
            start=scored.start + seen,
            logprobs=scored.logprobs[seen:],
            top_ids=scored.top_ids[top:],
            top_logprobs=scored.top_logprobs[top:],
        )

    def continued(self) -> Request:
        """The request as a new group of ranks gets it: it continues after the output so far."""
        sampling = self.request.sampling
        if self.output:  # the prompt was scored before the first token was drawn
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self.request, sampling=sampling, output_ids=tuple(self.output), group=0)

    def leave_process(self) -> None:
        """Another process is its rank now, and has nothing of it."""
        self.submitted = self.begun = False
        self.request = replace(self.request, hold=b"")  # a handle of its KV blocks names the process before

    def text_of(self, event: TokenEvent) -> tuple[str, str | None]:
        """(final text, stop string found or None) after this token."""
        if self.text is None:
            return "", None
        if event.finish is None:
            return self.text.push(event.token_id)
        is_stop = event.finish in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        return self.text.finish(event.token_id, is_stop=is_stop)

    def completion(self, reason: FinishReason, match: int | str | None) -> Completion:
        """Completion of an output after its last token was counted."""
        return Completion(
            reason=reason,
            match=match,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            first_token_seconds=self._first_token_seconds,
            total_seconds=self.last_at - self.admitted_at,
            max_gap_seconds=self.max_gap,
            queued_seconds=self._queued_seconds,
        )

    def summary(self, status: str, reason: str, now: float) -> RequestSummary:
        """Summary for the observer."""
        return RequestSummary(
            status=status,
            reason=reason,
            seconds=now - self.admitted_at,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            first_token_seconds=self._first_token_seconds if self.output_tokens else None,
            queued_seconds=self._queued_seconds if self.output_tokens else 0.0,
        )

    def log_end(self, summary: RequestSummary, node: int, failure: str) -> None:
        """Logs its end: at info if it failed or is traced, else at debug. failure: an error's message."""
        level = logging.INFO if failure or self.traceparent else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        first = summary.first_token_seconds
        fields: dict[str, str | int | float] = {
            "request_id": self.request.request_id,
            "status": summary.status,
            "node": node,
            "rank": self.rank,
            "tokens": summary.output_tokens,
            **({} if first is None else {"ttft_ms": round(first * 1000, 3)}),
            **({"trace_id": self.traceparent.split("-")[1]} if self.traceparent else {}),
        }
        log.log(
            level,
            "request %s: %s %s, %d prompt and %d output tokens in %.3f s, rank %d, traceparent %s%s",
            self.request.request_id,
            summary.status,
            summary.reason or "-",
            summary.prompt_tokens,
            summary.output_tokens,
            summary.seconds,
            self.rank,
            self.traceparent or "-",
            failure and f": {failure}",
            extra={"fields": fields},
        )

    @property
    def _first_token_seconds(self) -> float:
        return self.first_at - self.admitted_at

    @property
    def _queued_seconds(self) -> float:
        return min(self.queued, self._first_token_seconds)  # two processes, two clocks


def asked_by(sequences: Sequence[Submission]) -> Asked:
    """What the sequences of one call ask for together."""
    request, timeout = sequences[0].request, sequences[0].timeout
    longest = request.stopping.max_new_tokens
    return Asked(len(sequences), request.priority, request.dp_rank, longest, timeout)
