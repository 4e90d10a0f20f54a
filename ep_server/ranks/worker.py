"""[5] One rank: the loop that keeps it in step with the others.

The frontend is a channel; the other ranks are reached only through the vote and the exchange. One thread.
An error of a single request ends that request only; any other error ends the rank (life.py). Durations in
nanoseconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ep_server.errors import GroupAborted, InternalError, PeerLost, PeerTimeout
from ep_server.orders import OrderDone, PrepareGeneration
from ep_server.ranks.channel import RankChannel
from ep_server.ranks.membership import RankMembership
from ep_server.ranks.messages import (
    failed_message,
    interrupted_message,
    kv_events_message,
    one_line,
    prompt_logprobs_message,
    request_of,
    statistics_message,
    tokens_message,
)
from ep_server.ranks.order_desk import OrderDesk
from ep_server.ranks.order_messages import order_done_message, order_of
from ep_server.ranks.overlap import Planned, Ran
from ep_server.ranks.statistics import LaunchedStep, StepMeter, StepTimes
from ep_server.ranks.vote import Verdict, Voter
from ep_server.records import LATE_TOKEN, NO_TOKEN, PromptLogprobs, Request, StepBatch, TokenEvent
from ep_server.scheduler.cache_reporter import CacheReporter
from ep_server.scheduler.prompt_budget import prompt_tokens
from ep_server.v1 import rank_pb2 as pb

if TYPE_CHECKING:  # the parts import torch
    from ep_server.ranks.build import RankParts

log = logging.getLogger(__name__)
REPORT_NS = 500_000_000
MASK_LOOK_SECONDS = 0.001
CHANGE_LOOK_SECONDS = 0.05  # of a parked rank that prepares a change
CHECK_NS = 10_000_000_000  # a recount of 64k KV blocks takes 40 ms: not at every pause


class RankWorker:
    """Runs one rank's steps, and handles messages between them."""

    def __init__(
        self,
        parts: RankParts,
        channel: RankChannel,
        clock: Callable[[], int] = time.perf_counter_ns,
        *,
        outlives: bool = False,
    ) -> None:
        """outlives: where another rank fails, it waits for Regroup and goes on."""
        self._outlives = outlives
        self._regroup: pb.Regroup | None = None
        self._exchange, self._runner, self._scheduler = parts.exchange, parts.runner, parts.scheduler
        self._masks, self._copier = parts.masks, parts.copier
        self._handoff, self._lost_kv = parts.handoff, parts.lost_kv
        self._held: set[int] = set()  # requests whose mask was late
        self._channel, self._clock, self._voter = channel, clock, Voter()
        self._overlap, self._modes, self._profiler = parts.overlap, parts.modes, parts.profiler
        limits = parts.scheduler.limits
        self._meter = StepMeter(parts.ready.rank, min(limits.max_running, limits.max_step_tokens))
        self._meter.ready(self._exchange.statistics(), self._runner.statistics())
        self._cache = CacheReporter(
            parts.ready.rank, parts.scheduler, lambda batch: self._send(kv_events_message(batch)), time.time
        )
        self._membership = RankMembership(parts)
        self._desk = OrderDesk(parts, self._enter)
        self._changes = self._desk.changes
        self._launched: deque[LaunchedStep] = deque()
        self._running = 0  # sequences, as reported last
        self._left = False  # the others go on without this rank, as planned
        self._stop = self._idle = False  # idle: no rank had anything to do in the last vote
        self._reported = self._checked = clock()

    def __repr__(self) -> str:
        return f"RankWorker({self._voter!r}, {self._scheduler!r})"

    def run(self) -> None:
        """Steps and parks until every rank has the order to stop.

        Raises: ExchangeError, ChannelClosed, InternalError.
        """
        while self._go_on():
            pass
        self._scheduler.check_integrity()

    def _go_on(self) -> bool:
        """One step, or what follows where another rank failed; False once it was the last."""
        try:
            if self._left:
                self._profiler.stop()
                self.join()
            if self._regroup is not None:
                self._rejoin(self._regroup)
            return not self._left and self.step()
        except (PeerTimeout, PeerLost, GroupAborted) as error:
            if not self._outlives:
                raise
            log.warning("waiting to be regrouped: %s", error)
            self._send(interrupted_message(error))
            self._regroup = None
            self.join()
            return not self._stop

    def join(self) -> None:
        """Waits to be grouped with ranks that run. Raises: ChannelClosed."""
        while self._regroup is None and not self._stop:
            self._wait(CHANGE_LOOK_SECONDS if self._changes.preparing else None)
        if self._stop:
            self._scheduler.drop_steps()

    def _rejoin(self, order: pb.Regroup) -> None:
        """Drops the steps in flight and the requests that nobody awaits, and goes on with the live ranks.

        Raises: PeerTimeout, PeerLost if another rank is missing.
        """
        self._launched.clear()
        self._scheduler.drop_steps()
        self._changes.settle()
        self._forget_freed()
        self._profiler.stop()
        regrouped = self._membership.regroup(order)
        self._runner.drop_steps()
        self._voter = Voter(order.generation, max(order.work_number, self._voter.last_work))
        self._regroup, self._idle, self._running = None, False, -1
        self._channel.report(waiting=False)
        self._send(regrouped)

    def _enter(self, order: PrepareGeneration) -> None:
        """The vote has switched to other live ranks. Raises: as _rejoin()."""
        self._scheduler.drop_steps()  # planned for the step of this vote
        self._left = self._meter.rank not in order.live
        self._channel.report(waiting=self._left)
        if self._left:
            self._keep(set())
            self._forget_freed()
        else:
            self._membership.enter(order.generation, order.live, order.placement)
            self._voter, self._idle = Voter(order.generation, self._voter.last_work), False

    def _keep(self, numbers: set[int]) -> None:
        """Drops all other requests; nobody awaits them here."""
        for number in self._scheduler.live - numbers:
            self._scheduler.cancel(number)

    def _forget_freed(self) -> None:
        for number in self._scheduler.freed():  # those cancelled during a lost step too
            self._drop(number)

    def step(self) -> bool:
        """One step with all other ranks; False once it was the last.

        On return every message read is handled, and the tokens of this step, or of the one `ahead` before it,
        are sent. A step without tokens on any rank is not run: it only waits for the steps in flight.
        """
        if self._modes.due:
            while self._launched:
                self._finish(self._launched.popleft())
            self._modes.turn()
        start = self._clock()
        self._handle(self._channel.poll())
        if self._regroup is not None:
            return True
        self._check_masks()
        self._answer(self._changes.finished())
        batch = self._plan()
        planned = self._clock()
        verdict = self._vote(batch)
        if verdict.change and self._switch(verdict.change):
            return True
        times = start, planned, self._clock()
        run = verdict.run and any(verdict.tokens)
        if not run and self._held:
            self._masks.wait(self._held, MASK_LOOK_SECONDS)  # no rank has anything else to do
        elif not run:
            self._handoff.wait(MASK_LOOK_SECONDS)
        if run:
            bucket = verdict.bucket if verdict.graph else 0
            count = self._runner.micro_batches_of(bucket, verdict.micro_batches)
            launched = self._runner.launch(batch, count, bucket, self._modes.chosen(verdict, bucket, count))
            self._launched.append(LaunchedStep(batch, verdict, launched, bucket, count, times))
        self._copier.start_loads()
        while self._launched and (len(self._launched) > self._scheduler.limits.ahead or not run):
            self._finish(self._launched.popleft())
        if self._launched:
            self._complete(self._launched[-1])
        self._cache.publish()
        self._report_running()
        if verdict.park and self._idle:
            self._park()
            self._idle = False
        elif verdict.park != self._idle:
            # Reported one vote before parking: a rank that stops in between is missed at that vote.
            self._idle = verdict.park
            self._channel.report(waiting=verdict.park)
        return not verdict.stop

    def _plan(self) -> StepBatch:
        """The next step. The copies that precede it have begun."""
        elsewhere = self._handoff.before_plan() + self._lost_kv.before_plan()
        self._scheduler.loaded(self._copier.loaded() + elsewhere)
        batch = self._scheduler.plan(self._voter.elsewhere)
        if begun := self._meter.began(batch, self._clock()):  # before what such a request may break
            self._send(pb.FromRank(begun=pb.Begun(numbers=begun, copied=self._lost_kv.take_copied())))
        self._handoff.after_plan()
        if (moves := self._scheduler.moves()) is not None:
            self._copier.start(moves)
        return batch

    def _finish(self, step: LaunchedStep) -> None:
        """Waits for a step's tokens and publishes them."""
        self._complete(step)
        sampled = self._runner.collect(step.launched)
        ran = self._clock()
        self._publish_scores(self._runner.prompt_logprobs(step.launched))
        undrawn = [t.number for t in sampled if t.token_id == NO_TOKEN and self._scheduler.is_live(t.number)]
        events = self._scheduler.commit(step.batch, sampled)
        late = [t.number for t in sampled if t.token_id == LATE_TOKEN]
        self._held |= {number for number in late if self._scheduler.is_live(number)}
        if len(self._masks):
            self._masks.accept({event.number: event.token_id for event in events if event.finish is None})
        self._publish(events)
        self._fail(undrawn)
        times = StepTimes(*step.began, ran, self._clock())
        took = self._meter.stepped(step.batch, step.micro_batches, times, bucket=step.bucket)
        if self._profiler.running:
            self._profiler.stepped(self._meter.last_step)
        self._overlap.stepped(Ran(took, max(step.verdict.tokens), step.bucket, step.micro_batches))
        self._scheduler.budget.ran(step.verdict.ran(took, step.bucket), step.batch)
        if times.published - self._reported >= REPORT_NS:
            self._report()

    def _complete(self, step: LaunchedStep) -> None:
        """Draws what waits for masks. A request whose mask is late is in no step until it is there."""
        for number in self._runner.complete(step.launched):
            self._scheduler.hold(number)

    def _check_masks(self) -> None:
        """Fails requests whose grammar cannot be followed, and resumes those whose mask has arrived."""
        for number, reason in self._masks.failures().items() if len(self._masks) else ():
            self._scheduler.fail(number)
            self._drop(number)
            self._send(failed_message(number, f"the grammar cannot be followed: {reason}", by_grammar=True))
        for number in [number for number in self._held if self._masks.ready(number)]:
            self._held.discard(number)
            self._scheduler.release(number)

    def _answer(self, done: OrderDone | None) -> None:
        if done is not None:
            self._send(order_done_message(done))

    def _switch(self, change: int) -> bool:
        """Before the same step on all ranks. Returns: whether they vote again."""
        since, voter = self._clock(), self._voter
        while self._launched and self._changes.needs_idle:
            self._finish(self._launched.popleft())
        self._answer(self._changes.apply(change, since))
        return self._left or self._voter is not voter

    def _vote(self, batch: StepBatch) -> Verdict:
        bucket = self._runner.bucket_of(batch)
        record = self._voter.cast(
            tokens=batch.num_tokens,
            bucket=bucket,
            has_work=self._scheduler.has_work,
            micro_batch_ok=self._overlap.wants_two(Planned(len(batch.slices), batch.num_tokens, bucket)),
            graph_ok=bucket > 0 or not batch.slices,
            stop=self._stop,
            prepared=self._changes.offered,
            prompts=prompt_tokens(batch),
            streams=self._scheduler.streams,
            normal_from=self._modes.known,
        )
        return self._voter.decide(self._exchange.all_gather(record))

    def _park(self) -> None:
        """Sleeps until any rank has new work, or the order to stop."""
        last_work = self._voter.last_work
        self._meter.parked(last_work)
        self._report()
        if self._clock() - self._checked >= CHECK_NS:
            self._scheduler.check_integrity()
            self._checked = self._clock()
        while self._voter.last_work == last_work and not self._stop and self._regroup is None:
            self._wait(self._handoff.rest(CHANGE_LOOK_SECONDS if self._changes.preparing else None))
            if self._handoff.free_held():
                self._report()

    def _wait(self, seconds: float | None) -> None:
        self._handle(self._channel.wait(seconds))
        self._answer(self._changes.finished())

    def _handle(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            message = pb.ToRank.FromString(payload)
            kind = message.WhichOneof("kind")
            if kind == "doorbell":
                self._voter.saw(message.doorbell.work_number)
            elif kind == "add":
                self._voter.saw(message.add.work_number)
                self._add(message.add.request)
            elif kind == "cancel":
                self._scheduler.cancel(message.cancel.number)
                self._release()
            elif kind == "order":
                if message.order.work_number:
                    self._voter.saw(message.order.work_number)
                done = self._desk.obey(order_of(message.order), message.order.number)
                self._cache.publish()  # a parked rank ends no step soon
                self._answer(done)
            elif kind == "watch_cache":
                self._cache.watch(on=message.watch_cache.on)
            elif kind == "regroup":
                self._regroup = message.regroup
                self._keep(set(message.regroup.kept))
                self._cache.restart()  # now: who watches the new generation may follow at once
            elif kind == "forget_lost":
                self._lost_kv.forget()
            elif kind == "shutdown":
                self._stop = True
            else:
                raise InternalError(f"a running rank received an unexpected message of kind {kind!r}")

    def _add(self, wire: pb.Request) -> None:
        """A request that cannot be added fails alone: it is in no queue yet."""
        self._send(pb.FromRank(begun=pb.Begun(adding=wire.number)))  # before what such a request may break
        try:
            self._enqueue(request_of(wire))
        except Exception as error:
            log.exception("request %d could not be added", wire.number)
            self._send(failed_message(wire.number, one_line(error)))
        else:
            self._meter.arrived(wire.number, self._clock())
        self._send(pb.FromRank(begun=pb.Begun()))

    def _enqueue(self, request: Request) -> None:
        self._runner.add(request)
        try:
            self._scheduler.add(request)
        except Exception:
            self._runner.remove(request.number)
            raise
        self._masks.add(request, request.output_ids)

    def _publish(self, events: Sequence[TokenEvent]) -> None:
        if events:
            timed = self._meter.with_queue_times(events)
            self._send(tokens_message(timed, self._meter.steps, self._scheduler.weights))
            for event in events:
                if event.finish is not None:
                    self._drop(event.number)
        self._release()

    def _publish_scores(self, scores: Sequence[PromptLogprobs]) -> None:
        for scored in scores:
            if self._scheduler.is_live(scored.number):
                for part in scored.parts():
                    self._send(prompt_logprobs_message(part))

    def _fail(self, undrawn: Sequence[int]) -> None:
        """Fails requests whose logits are NaN or infinite, alone: resending one must not stop the server."""
        for number in undrawn:
            log.error("the logits of request %d hold NaN or infinity", number)
            self._drop(number)
            self._send(failed_message(number, "its logits hold NaN or infinity"))

    def _release(self) -> None:
        for number in self._scheduler.freed():
            self._drop(number)
            self._send(pb.FromRank(freed=pb.Freed(number=number)))

    def _drop(self, number: int) -> None:
        self._runner.remove(number)
        self._masks.remove(number)
        self._held.discard(number)
        self._meter.left(number)

    def _report_running(self) -> None:
        if self._scheduler.running != self._running:
            self._running = self._scheduler.running
            self._send(pb.FromRank(running=self._running))

    def _report(self) -> None:
        self._reported = self._clock()
        kv = self._copier.counters() | self._handoff.counters() | self._lost_kv.counters()
        parts = self._exchange.statistics(), self._runner.statistics(), kv | self._modes.counters()
        self._send(statistics_message(self._meter.gather(self._scheduler.load(), *parts)))

    def _send(self, message: pb.FromRank) -> None:
        self._channel.send(message.SerializeToString())
