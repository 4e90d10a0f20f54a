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
    interrupted_message,
    kv_events_message,
    statistics_message,
)
from ep_server.ranks.order_desk import OrderDesk
from ep_server.ranks.order_messages import order_done_message, order_of
from ep_server.ranks.overlap import Planned, Ran
from ep_server.ranks.requests import RankRequests
from ep_server.ranks.statistics import LaunchedStep, StepMeter, StepTimes
from ep_server.ranks.vote import Verdict, Voter
from ep_server.records import StepBatch
from ep_server.scheduler.cache_reporter import CacheReporter
from ep_server.scheduler.prompt_budget import prompt_tokens
from ep_server.v1 import rank_pb2 as pb

if TYPE_CHECKING:  # the parts import torch
    from ep_server.ranks.build import RankParts

log = logging.getLogger(__name__)
REPORT_NS = 500_000_000
LOOK_SECONDS = 0.001  # of a rank that waits for masks or KV
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
        self._copier, self._handoff, self._lost_kv = parts.copier, parts.handoff, parts.lost_kv
        self._channel, self._clock, self._voter = channel, clock, Voter()
        self._overlap, self._modes, self._profiler = parts.overlap, parts.modes, parts.profiler
        limits = parts.scheduler.limits
        self._meter = StepMeter(parts.ready.rank, min(limits.max_running, limits.max_step_tokens))
        self._meter.ready(self._exchange.statistics(), self._runner.statistics())
        self._requests = RankRequests(parts, self._meter, self._send, clock)
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
        self._reported = self._checked = self._told = clock()

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
            if self._regroup is not None and not self._rejoin(self._regroup):
                return not self._stop
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

    def _rejoin(self, order: pb.Regroup) -> bool:
        """Drops the steps in flight and the requests that nobody awaits, and goes on with the live ranks.

        Returns: False if another order came meanwhile. Raises: as RankMembership.regroup().
        """
        self._launched.clear()
        self._scheduler.drop_steps()
        self._changes.settle()
        self._requests.forget_freed()
        self._profiler.stop()

        def stands() -> bool:
            self._handle(self._channel.poll())
            return self._regroup is order and not self._stop

        if (regrouped := self._membership.regroup(order, self._alive, stands)) is None:
            return False
        self._runner.drop_steps()
        self._voter = Voter(order.generation, max(order.work_number, self._voter.last_work))
        self._regroup, self._idle, self._running = None, False, -1
        self._channel.report(waiting=False)
        self._send(regrouped)
        return True

    def _enter(self, order: PrepareGeneration) -> None:
        """The vote has switched to other live ranks. Raises: as _rejoin()."""
        self._scheduler.drop_steps()  # planned for the step of this vote
        self._left = self._meter.rank not in order.live
        self._channel.report(waiting=self._left)
        if self._left:
            self._requests.keep(set())
            self._requests.forget_freed()
        else:
            self._membership.enter(order.generation, order.live, order.placement)
            self._voter, self._idle = Voter(order.generation, self._voter.last_work), False

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
        self._requests.check_masks()
        self._answer(self._changes.finished())
        batch = self._plan()
        planned = self._clock()
        verdict = self._vote(batch)
        if verdict.change and self._switch(verdict.change):
            return True
        times = start, planned, self._clock()
        run = verdict.run and any(verdict.tokens)
        if not run and not self._requests.await_masks(LOOK_SECONDS):  # no rank has anything else to do
            self._handoff.wait(LOOK_SECONDS)
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
        self._handoff.after_plan(self._start_copies)
        return batch

    def _start_copies(self) -> None:
        if (moves := self._scheduler.moves()) is not None:
            self._copier.start(moves)

    def _finish(self, step: LaunchedStep) -> None:
        """Waits for a step's tokens and publishes them."""
        self._complete(step)
        sampled = self._runner.collect(step.launched)
        ran = self._clock()
        self._requests.publish(step.batch, sampled, self._runner.prompt_logprobs(step.launched))
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
            load = self._scheduler.load()
            self._wait(self._handoff.rest(CHANGE_LOOK_SECONDS if self._changes.preparing else None))
            freed, parked = self._handoff.free_held(), self._voter.last_work == last_work
            if freed or (parked and self._scheduler.load() != load):  # an order freed blocks
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
                self._requests.add(message.add.request)
            elif kind == "cancel":
                self._scheduler.cancel(message.cancel.number)
                self._requests.release()
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
                self._requests.keep(set(message.regroup.kept))
                self._cache.restart()  # now: who watches the new generation may follow at once
            elif kind == "forget_lost":
                self._lost_kv.forget()
            elif kind == "shutdown":
                self._stop = True
            else:
                raise InternalError(f"a running rank received an unexpected message of kind {kind!r}")

    def _report_running(self) -> None:
        if self._scheduler.running != self._running:
            self._running = self._scheduler.running
            self._send(pb.FromRank(running=self._running))

    def _report(self) -> None:
        self._reported = self._clock()
        kv = self._copier.counters() | self._handoff.counters() | self._lost_kv.counters()
        parts = self._exchange.statistics(), self._runner.statistics(), kv | self._modes.counters()
        self._send(statistics_message(self._meter.gather(self._scheduler.load(), *parts)))

    def _alive(self) -> None:
        """Shows the launcher that this rank does not hang. No more often than statistics."""
        if self._clock() - self._told >= REPORT_NS:
            self._told = self._clock()
            self._send(pb.FromRank(progress=pb.Progress(stage="regroup", total=1)))

    def _send(self, message: pb.FromRank) -> None:
        self._channel.send(message.SerializeToString())
