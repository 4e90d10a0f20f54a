"""[10] Delivers tokens and ends from the ranks to the streams. Implements RankListener.

Runs in one event loop and never blocks. A request leaves in two steps: its stream ends (reader and id are
free), then its rank frees its KV blocks (its room is free). Every end is one event of the lifecycle table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ep_server.engine.active_request import ActiveRequest
from ep_server.engine.admission import Pace
from ep_server.engine.observer import EngineObserver, RequestSummary
from ep_server.engine.request_table import RequestTable
from ep_server.errors import (
    DeadlineExceeded,
    EpServerError,
    InternalError,
    RankLost,
    RequestCancelled,
    SlowReader,
)
from ep_server.ranks.protocol import Ranks
from ep_server.records import FinishReason, RankStatistics, TokenEvent
from ep_server.scheduler.lifecycle import Event, State, advance

log = logging.getLogger(__name__)

# A call's own deadline cancels it a moment before the same deadline of the request passes.
DEADLINE_SLACK_SECONDS = 0.05


class Delivery:
    """Follows admitted requests to their end.

    pace: records how fast requests end.
    """

    def __init__(
        self,
        ranks: Ranks,
        requests: RequestTable,
        observer: EngineObserver,
        clock: Callable[[], float],
        pace: Pace,
    ) -> None:
        self.lost = asyncio.Event()
        self.lost_message = ""
        self.rank_statistics: dict[int, RankStatistics] = {}
        self._ranks = ranks
        self._requests = requests
        self._observer = observer
        self._clock = clock
        self._pace = pace

    def on_tokens(self, rank: int, events: Sequence[TokenEvent]) -> None:
        """Delivers the tokens of one step; drops those of requests that ended meanwhile."""
        now = self._clock()
        for event in events:
            active = self._requests.with_number(event.number)
            if active is None:
                continue
            if not active.state.ended:
                self._deliver(active, event, now)
            elif event.finish is not None:  # finished before the rank read the cancel
                self._free(active)
        self.tell_load()

    def on_freed(self, rank: int, number: int) -> None:
        """A cancelled request's KV blocks are free."""
        active = self._requests.with_number(number)
        if active is not None and active.state.ended:
            self._free(active)

    def on_request_failed(self, rank: int, number: int, message: str) -> None:
        """Ends the request with INTERNAL; its KV blocks are free."""
        active = self._requests.with_number(number)
        if active is None:
            return
        if active.state.ended:
            self._free(active)
        else:
            self.fail(active, Event.FAIL, InternalError(f"rank {rank}: {message}"), at_rank=False)

    def on_statistics(self, statistics: RankStatistics) -> None:
        """Keeps the newest measurements of a rank."""
        self.rank_statistics[statistics.rank] = statistics
        self._observer.on_statistics(statistics)

    def on_lost(self, rank: int, message: str) -> None:
        """Ends every stream with UNAVAILABLE. The ranks get no more commands."""
        self.lost_message = f"rank {rank} was lost: {message}"
        self._observer.on_rank_lost(rank)
        for active in self._requests:
            self.fail(active, Event.FAIL, RankLost(self.lost_message), at_rank=False)
        self.lost.set()

    def fail(
        self, active: ActiveRequest, event: Event, error: EpServerError, *, at_rank: bool = True
    ) -> None:
        """Ends a request with an error. at_rank: the rank still runs it and gets a cancel."""
        self._end(active, event, error.status, "")
        active.stream.fail(error)
        self._leave_rank(active, at_rank=at_rank)

    def expire(self, active: ActiveRequest) -> None:
        """The deadline of a request passed."""
        self.fail(active, Event.EXPIRE, DeadlineExceeded("the deadline of the request passed"))

    def reader_left(self, active: ActiveRequest, error: EpServerError | None) -> None:
        """The stream was closed, by `error` if there is one; a request that has not ended is cancelled."""
        if active.state.ended:
            self._requests.read(active)
            if error is not None:
                self._observer.on_unread_ended()
            self.tell_load()
        elif error is not None:
            self.fail(active, Event.FAIL, error)
        elif active.deadline is not None and self._clock() >= active.deadline - DEADLINE_SLACK_SECONDS:
            self.expire(active)
        else:
            self.fail(active, Event.CANCEL, RequestCancelled("the stream was dropped"))

    def tell_load(self) -> None:
        """Reports how many requests run, wait and are unread."""
        ranks = self._requests.ranks
        running, waiting = sum(r.running for r in ranks), sum(r.waiting for r in ranks)
        self._observer.on_load(running, waiting, self._requests.unread)

    def _deliver(self, active: ActiveRequest, event: TokenEvent, now: float) -> None:
        if active.output_tokens == 0:
            active.state = advance(active.state, Event.ADMIT, active.request.request_id)
            active.first_at, active.cached_tokens = now, event.cached_tokens
            active.queued = event.queued_ns / 1e9
            self._requests.started(active)
            self._observer.on_first_token(now - active.admitted_at)
        else:
            gap = now - active.last_at
            active.max_gap = max(active.max_gap, gap)
            self._observer.on_token_gap(gap)
        active.last_at = now
        self._requests.grew(active)
        at_rank = event.finish is None
        try:
            text, found = active.text_of(event)
            active.stream.put(event, text)
        except SlowReader as error:
            self.fail(active, Event.FAIL, error, at_rank=at_rank)
            return
        except Exception:  # a fault in one request's text ends only that request
            log.exception("request %s: decoding its text failed", active.request.request_id)
            broken = InternalError(f"token {event.token_id} could not be turned into text")
            self.fail(active, Event.FAIL, broken, at_rank=at_rank)
            return
        if found is not None:
            self._finish(active, FinishReason.STOP_STRING, found, at_rank=at_rank)
        elif event.finish is not None:
            match = None if event.finish is FinishReason.LENGTH else event.token_id
            self._finish(active, event.finish, match, at_rank=False)

    def _finish(
        self, active: ActiveRequest, reason: FinishReason, match: int | str | None, *, at_rank: bool
    ) -> None:
        self._end(active, Event.FINISH, "OK", reason)
        active.stream.finish(active.completion(reason, match))
        self._leave_rank(active, at_rank=at_rank)

    def _end(self, active: ActiveRequest, event: Event, status: str, reason: str) -> None:
        """Frees the reader's side: state, id and timer."""
        active.state = advance(active.state, event, active.request.request_id)
        self._requests.ended(active)
        if active.deadline is not None and active.output_tokens:
            seconds = active.last_at - active.admitted_at - active.queued
            self._pace.ran(seconds, active.output_tokens, finished=event is Event.FINISH)
        if active.timer is not None:
            active.timer.cancel()
            active.timer = None
        summary = active.summary(status, reason, self._clock())
        self._observer.on_finished(summary)
        _log(active, summary)

    def _leave_rank(self, active: ActiveRequest, *, at_rank: bool) -> None:
        """Frees the rank's side: now, or by a cancel that on_freed answers."""
        if at_rank and not self.lost.is_set():
            active.cancelled_at = self._clock()
            self._ranks.cancel(active.rank, active.request.number)
        else:
            self._free(active)
        self.tell_load()

    def _free(self, active: ActiveRequest) -> None:
        now = self._clock()
        self._requests.freed(active)
        if active.output_tokens:
            self._pace.ended(now, len(self._requests), finished=active.state is State.FINISHED)
        if active.cancelled_at is not None:
            self._observer.on_freed(now - active.cancelled_at)


def _log(active: ActiveRequest, summary: RequestSummary) -> None:
    """Logs the end of a request: at info if it is traced, else at debug."""
    log.log(
        logging.INFO if active.traceparent else logging.DEBUG,
        "request %s: %s %s, %d prompt and %d output tokens in %.3f s, rank %d, traceparent %s",
        active.request.request_id,
        summary.status,
        summary.reason or "-",
        summary.prompt_tokens,
        summary.output_tokens,
        summary.seconds,
        active.rank,
        active.traceparent or "-",
    )
