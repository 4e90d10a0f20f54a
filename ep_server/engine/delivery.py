"""[10] From the ranks to the streams: tokens, ends, frees. Implements RankListener.

Knows no gRPC and admits nothing; everything happens in one event loop and nothing here blocks.
A request leaves in two steps: its stream ends (reader and id are free), then its rank has freed its KV
blocks (room is free). Every end is one event of the lifecycle table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ep_server.engine.active_request import Flight
from ep_server.engine.admission import Pace
from ep_server.engine.observer import EngineObserver, RequestSummary
from ep_server.engine.request_table import FlightTable
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

    pace: learns how fast requests end.
    """

    def __init__(
        self,
        ranks: Ranks,
        flights: FlightTable,
        observer: EngineObserver,
        clock: Callable[[], float],
        pace: Pace,
    ) -> None:
        self.lost = asyncio.Event()
        self.lost_message = ""
        self.rank_statistics: dict[int, RankStatistics] = {}
        self._ranks = ranks
        self._flights = flights
        self._observer = observer
        self._clock = clock
        self._pace = pace

    def on_tokens(self, rank: int, events: Sequence[TokenEvent]) -> None:
        """Delivers the tokens of one step; those of requests that ended meanwhile are dropped."""
        now = self._clock()
        for event in events:
            flight = self._flights.with_number(event.number)
            if flight is None:
                continue
            if not flight.state.ended:
                self._deliver(flight, event, now)
            elif event.finish is not None:  # ended by itself before the rank saw the cancel
                self._free(flight)
        self.tell_load()

    def on_freed(self, rank: int, number: int) -> None:
        """A cancelled request's KV blocks are free."""
        flight = self._flights.with_number(number)
        if flight is not None and flight.state.ended:
            self._free(flight)

    def on_request_failed(self, rank: int, number: int, message: str) -> None:
        """Ends the request with INTERNAL; its KV blocks are free."""
        flight = self._flights.with_number(number)
        if flight is None:
            return
        if flight.state.ended:
            self._free(flight)
        else:
            self.fail(flight, Event.FAIL, InternalError(f"rank {rank}: {message}"), at_rank=False)

    def on_statistics(self, statistics: RankStatistics) -> None:
        """Keeps the newest measurements of a rank."""
        self.rank_statistics[statistics.rank] = statistics
        self._observer.on_statistics(statistics)

    def on_lost(self, rank: int, message: str) -> None:
        """Ends every stream with UNAVAILABLE; nothing is asked of the ranks any more."""
        self.lost_message = f"rank {rank} was lost: {message}"
        self._observer.on_rank_lost(rank)
        for flight in self._flights:
            self.fail(flight, Event.FAIL, RankLost(self.lost_message), at_rank=False)
        self.lost.set()

    def fail(self, flight: Flight, event: Event, error: EpServerError, *, at_rank: bool = True) -> None:
        """Ends a request with an error. at_rank: the rank still runs it and has to be told."""
        self._end(flight, event, error.status, "")
        flight.stream.fail(error)
        self._leave_rank(flight, at_rank=at_rank)

    def expire(self, flight: Flight) -> None:
        """The deadline of a request passed."""
        self.fail(flight, Event.EXPIRE, DeadlineExceeded("the deadline of the request passed"))

    def reader_left(self, flight: Flight, error: EpServerError | None) -> None:
        """The stream was closed, by `error` if there is one; a request that has not ended is cancelled."""
        if flight.state.ended:
            self._flights.read(flight)
            if error is not None:
                self._observer.on_unread_ended()
            self.tell_load()
        elif error is not None:
            self.fail(flight, Event.FAIL, error)
        elif flight.deadline is not None and self._clock() >= flight.deadline - DEADLINE_SLACK_SECONDS:
            self.expire(flight)
        else:
            self.fail(flight, Event.CANCEL, RequestCancelled("the stream was dropped"))

    def tell_load(self) -> None:
        """Reports how many requests run, wait and are unread."""
        ranks = self._flights.ranks
        running, waiting = sum(r.running for r in ranks), sum(r.waiting for r in ranks)
        self._observer.on_load(running, waiting, self._flights.unread)

    def _deliver(self, flight: Flight, event: TokenEvent, now: float) -> None:
        if flight.output_tokens == 0:
            flight.state = advance(flight.state, Event.ADMIT, flight.request.request_id)
            flight.first_at, flight.cached_tokens = now, event.cached_tokens
            flight.queued = event.queued_ns / 1e9
            self._flights.started(flight)
            self._observer.on_first_token(now - flight.admitted_at)
        else:
            gap = now - flight.last_at
            flight.max_gap = max(flight.max_gap, gap)
            self._observer.on_token_gap(gap)
        flight.last_at = now
        self._flights.grew(flight)
        at_rank = event.finish is None
        try:
            text, found = flight.text_of(event)
            flight.stream.put(event, text)
        except SlowReader as error:
            self.fail(flight, Event.FAIL, error, at_rank=at_rank)
            return
        except Exception:  # a fault in one request's text ends that request alone, and now
            log.exception("request %s", flight.request.request_id)
            broken = InternalError(f"token {event.token_id} could not be turned into text")
            self.fail(flight, Event.FAIL, broken, at_rank=at_rank)
            return
        if found is not None:
            self._finish(flight, FinishReason.STOP_STRING, found, at_rank=at_rank)
        elif event.finish is not None:
            match = None if event.finish is FinishReason.LENGTH else event.token_id
            self._finish(flight, event.finish, match, at_rank=False)

    def _finish(
        self, flight: Flight, reason: FinishReason, match: int | str | None, *, at_rank: bool
    ) -> None:
        self._end(flight, Event.FINISH, "OK", reason)
        flight.stream.finish(flight.completion(reason, match))
        self._leave_rank(flight, at_rank=at_rank)

    def _end(self, flight: Flight, event: Event, status: str, reason: str) -> None:
        """The reader's half of leaving: state, id and timer."""
        flight.state = advance(flight.state, event, flight.request.request_id)
        self._flights.ended(flight)
        if flight.deadline is not None and flight.output_tokens:
            seconds = flight.last_at - flight.admitted_at - flight.queued
            self._pace.ran(seconds, flight.output_tokens, finished=event is Event.FINISH)
        if flight.timer is not None:
            flight.timer.cancel()
            flight.timer = None
        summary = flight.summary(status, reason, self._clock())
        self._observer.on_finished(summary)
        _log(flight, summary)

    def _leave_rank(self, flight: Flight, *, at_rank: bool) -> None:
        """The rank's half: over already, or asked for and answered by on_freed."""
        if at_rank and not self.lost.is_set():
            flight.cancelled_at = self._clock()
            self._ranks.cancel(flight.rank, flight.request.number)
        else:
            self._free(flight)
        self.tell_load()

    def _free(self, flight: Flight) -> None:
        now = self._clock()
        self._flights.freed(flight)
        if flight.output_tokens:
            self._pace.ended(now, len(self._flights), finished=flight.state is State.FINISHED)
        if flight.cancelled_at is not None:
            self._observer.on_freed(now - flight.cancelled_at)


def _log(flight: Flight, summary: RequestSummary) -> None:
    """The line of a request that ended: always of one that is traced, of the others on demand."""
    log.log(
        logging.INFO if flight.traceparent else logging.DEBUG,
        "request %s: %s %s, %d prompt and %d output tokens in %.3f s, rank %d, traceparent %s",
        flight.request.request_id,
        summary.status,
        summary.reason or "-",
        summary.prompt_tokens,
        summary.output_tokens,
        summary.seconds,
        flight.rank,
        flight.traceparent or "-",
    )
