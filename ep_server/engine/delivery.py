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
from ep_server.engine.kv_events import KvEvents
from ep_server.engine.observer import EngineObserver
from ep_server.engine.rank_orders import RankOrders
from ep_server.engine.recovery_phases import RecoveryPhases
from ep_server.engine.request_table import RequestTable
from ep_server.errors import (
    DeadlineExceeded,
    EpServerError,
    InternalError,
    RankLost,
    RequestCancelled,
    SlowReader,
)
from ep_server.orders import OrderDone
from ep_server.ranks.protocol import GroupState, Ranks, Restarted
from ep_server.records import (
    FinishReason,
    KvEventBatch,
    LossCause,
    PromptLogprobs,
    RankReady,
    RankStatistics,
    TokenEvent,
)
from ep_server.scheduler.lifecycle import Event, State, advance

log = logging.getLogger(__name__)

# A call's own deadline cancels it a moment before the same deadline of the request passes.
DEADLINE_SLACK_SECONDS = 0.05
MAX_LOSSES = 2  # of ranks that computed or added a request, which it survives without a token in between


class Delivery:
    """Follows admitted requests to their end.

    pace: records how fast requests end. ranks_per_node: for the log.
    """

    def __init__(
        self,
        ranks: Ranks,
        requests: RequestTable,
        observer: EngineObserver,
        clock: Callable[[], float],
        pace: Pace,
        ranks_per_node: int = 1,
        recovers: Callable[[int | None], bool] = lambda _rank: False,
        warm: Callable[[Sequence[RankReady]], None] = lambda _ready: None,
    ) -> None:
        """recovers: called with a lost rank, or None: True if other ranks start, and resume() follows.
        warm: called with the live ranks when these change as planned."""
        self.lost = asyncio.Event()  # for good
        self.lost_message = ""
        self.down = False  # a rank is lost, and a new group starts: the ranks get no commands
        self.rank_statistics: dict[int, RankStatistics] = {}
        self.group: GroupState | None = None  # where ranks outlive the loss of others
        self.orders = RankOrders(ranks)
        self.kv_events = KvEvents(ranks)
        self.phases = RecoveryPhases(observer, clock, ranks.forget_lost)
        self._ranks = ranks
        self._requests = requests
        self._observer = observer
        self._clock = clock
        self._pace = pace
        self._ranks_per_node = ranks_per_node
        self._recovers, self._warm = recovers, warm
        self._awaited: dict[int, list[int]] = {}  # by rank: requests that it goes on with after a loss

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

    def on_prompt_logprobs(self, rank: int, scored: PromptLogprobs) -> None:
        """Delivers them; drops those of a request that ended meanwhile."""
        active = self._requests.with_number(scored.number)
        if active is None or active.state.ended:
            return
        new = active.unseen(scored)
        if new is not None:
            active.stream.put_prompt(new)

    def on_freed(self, rank: int, number: int) -> None:
        """A cancelled request's KV blocks are free."""
        active = self._requests.with_number(number)
        if active is not None and active.state.ended:
            self._free(active)

    def on_request_failed(self, rank: int, number: int, error: EpServerError) -> None:
        """Ends the request with this error; its KV blocks are free."""
        active = self._requests.with_number(number)
        if active is None:
            return
        if active.state.ended:
            self._free(active)
        else:
            self.fail(active, Event.FAIL, error, at_rank=False)

    def on_statistics(self, statistics: RankStatistics) -> None:
        """Keeps the newest measurements of a rank, if it serves: one that leaves reports until it ends."""
        if self.group is None or statistics.rank in self.group.live:
            self.rank_statistics[statistics.rank] = statistics
            self._observer.on_statistics(statistics)

    def on_running(self, rank: int, sequences: int) -> None:
        """Keeps how many sequences a rank runs."""
        self._requests.ranks[rank].admitted = sequences

    def on_begun(self, rank: int, numbers: Sequence[int], adding: int = 0, copied: int = 0) -> None:
        """From now on, these requests may be why the rank is lost."""
        self._requests.begin(rank, numbers, adding)
        self.phases.copied += copied

    def on_kv_events(self, batch: KvEventBatch) -> None:
        """Passes changes of a rank's prefix cache to the subscribers."""
        if not self.down:
            self.kv_events.on_events(batch)

    def on_order_done(self, rank: int, done: OrderDone) -> None:
        """A rank's answer to an order."""
        self.orders.on_done(rank, done)

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        """Counts the loss, for the rank and for each of its requests."""
        self._observer.on_rank_lost(rank, cause)
        if rank not in self.orders.live:  # it has not joined
            self._observer.on_rank_out(rank)
        self._requests.lost(rank)

    def on_group(self, state: GroupState) -> None:
        """Another generation serves."""
        first, self.group = self.group is None, state
        self._observer.on_group(len(state.live), state.lacking_bytes)
        if first:
            self.orders.live = self.kv_events.live = state.live
        elif not self.down:  # as planned; else replaced() follows
            self._serving(state.live)
            self._warm(state.ready)

    def _serving(self, live: Sequence[int]) -> None:
        for rank in set(self.orders.live) - set(live):
            self.rank_statistics.pop(rank, None)
            self.kv_events.left(rank)
            self._observer.on_rank_out(rank)
        self.orders.live = self.kv_events.live = live

    def on_left(self, rank: int) -> None:
        """A rank takes part no more: its requests continue at others, after their last token."""
        for active in self._requests.releasing():
            if active.rank == rank:
                self._free(active)
        self._requests.ranks[rank].admitted = 0
        left = [active for active in self._requests if active.rank == rank and active.submitted]
        tokens = self._requests.run_again()
        for active in sorted(left, key=lambda active: active.request.number):
            if active.rank == rank and self.group is not None:  # else moved with another one of its call
                self._requests.give(active, self.group.ready, tokens)
            self._ranks.submit(active.rank, active.continued())
            active.begun = False
        log.info("rank %d left: its %d requests continue at other ranks", rank, len(left))

    def on_lost(self, rank: int, message: str, seconds: float) -> None:
        """Pauses the streams until resume(), or ends them with UNAVAILABLE; the ranks get no commands."""
        self.phases.lost(seconds)
        self._requests.ranks[rank].admitted = 0
        self._pause(f"rank {rank} was lost: {message}", rank)

    def on_regroup(self, why: str) -> None:
        """As on_lost, where no rank is lost."""
        if not self.down:
            self.phases.lost(None)
            self._pause(why, None)

    def _pause(self, why: str, rank: int | None) -> None:
        self.lost_message = why
        self.orders.end(RankLost(why))
        self.kv_events.end(RankLost(why))
        self.down = True
        for active in self._requests.releasing():
            self._free(active)
        self._awaited.clear()
        self.tell_load()
        if not self._recovers(rank):
            self.give_up("")

    def give_up(self, why: str) -> None:
        """Ends every stream with UNAVAILABLE. why: no new group of ranks serves them."""
        self.lost_message += f"; {why}" if why else ""
        for active in self._requests:
            self.fail(active, Event.FAIL, RankLost(self.lost_message), at_rank=False)
        self.lost.set()

    def awaited(self, rank: int) -> list[int]:
        """Numbers of the requests that a rank goes on with, if it outlives a loss."""
        found = [a.request.number for a in self._requests if a.rank == rank and a.submitted]
        self._awaited[rank] = found
        return found

    def replaced(self, restarted: Restarted, max_context: int) -> None:
        """Live ranks are new processes, but for those kept. max_context: as they have room for, tokens."""
        self._serving([ready.rank for ready in restarted.ready])
        for active in self._requests:
            if active.rank not in restarted.kept:
                active.leave_process()
        for rank, count in enumerate(self._requests.ranks):
            if rank not in restarted.kept:
                count.admitted = count.adding = 0
                self._awaited.pop(rank, None)
        self._move(restarted.ready, max_context)
        self.phases.served(restarted.load_seconds)

    def _move(self, ready: Sequence[RankReady], max_context: int) -> None:
        """Spreads requests that no rank has over the live ones, oldest first; ends those that no longer fit.

        New processes in the place of lost ones would run them alone, while the others wait in each step.
        """
        tokens, given = self._requests.run_again(), set[int]()
        for active in sorted(self._requests, key=lambda active: active.request.number):
            length = len(active.request.prompt_ids) + active.request.stopping.max_new_tokens
            if length > max_context:
                why = f"the ranks that are left have room for {max_context} tokens, it may need {length}"
                self.fail(active, Event.FAIL, RankLost(f"{self.lost_message}; {why}"), at_rank=False)
            elif not active.submitted and active.request.number not in given:
                given |= {each.request.number for each in self._requests.give(active, ready, tokens)}

    def resume(self) -> int:
        """Gives every open request that no rank has to its rank, oldest first. Returns: how many.

        One that cost more than MAX_LOSSES ranks, which computed or added it, ends: it may be the cause.
        """
        self.down = False
        self.orders.begin()
        for rank, numbers in self._awaited.items():
            for number in numbers:
                if self._requests.with_number(number) is None:  # it ended while the ranks regrouped
                    self._ranks.cancel(rank, number)
        waiting = [active for active in self._requests if not active.submitted]
        self.phases.resumed(waiting)
        for active in sorted(waiting, key=lambda active: active.request.number):
            if active.suspected > MAX_LOSSES:
                why = f"{self.lost_message}; {active.suspected} ranks were lost while they worked on it"
                self.fail(active, Event.FAIL, RankLost(why), at_rank=False)
            else:
                self._ranks.submit(active.rank, active.continued())
                active.submitted = True
        return len(waiting)

    def fail(
        self, active: ActiveRequest, event: Event, error: EpServerError, *, at_rank: bool = True
    ) -> None:
        """Ends a request with an error. at_rank: the rank still runs it and gets a cancel."""
        reason = "slow_reader" if isinstance(error, SlowReader) else ""
        self._end(active, event, error.status, reason, str(error))
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
        active.losses = active.suspected = 0
        self.phases.token(active.request.number, event.cached_tokens)
        active.output.append(event.token_id)
        self._requests.grew(active)
        at_rank = event.finish is None
        try:
            text, found = active.text_of(event)
            active.stream.put(event, text, active.rank)
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

    def _end(self, active: ActiveRequest, event: Event, status: str, reason: str, failure: str = "") -> None:
        """Frees the reader's side: state, id and timer. failure: the message of the error that ends it."""
        active.state = advance(active.state, event, active.request.request_id)
        self._requests.ended(active)
        self.phases.settled(active.request.number)
        if active.deadline is not None and active.output_tokens:
            seconds = active.last_at - active.admitted_at - active.queued
            self._pace.ran(seconds, active.output_tokens, finished=event is Event.FINISH)
        if active.timer is not None:
            active.timer.cancel()
            active.timer = None
        summary = active.summary(status, reason, self._clock())
        self._observer.on_finished(summary)
        active.log_end(summary, active.rank // self._ranks_per_node, failure)

    def _leave_rank(self, active: ActiveRequest, *, at_rank: bool) -> None:
        """Frees the rank's side: now, or by a cancel that on_freed answers."""
        if at_rank and not self.down:
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
