"""[5] One rank: the loop that keeps it in step with the others.

Knows the front only as a channel and the other ranks only through the vote and the exchange. One thread. A
fault of a single request ends that request only; any other is the end of the rank (life.py). Durations in
nanoseconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep_server.errors import InternalError
from ep_server.ranks.channel import RankChannel
from ep_server.ranks.messages import one_line, request_of, statistics_message, tokens_message
from ep_server.ranks.overlap import Ran
from ep_server.ranks.statistics import StepMeter, StepTimes
from ep_server.ranks.vote import Verdict, Voter
from ep_server.records import NO_TOKEN, StepBatch, TokenEvent
from ep_server.v1 import rank_pb2 as pb

if TYPE_CHECKING:  # the parts come with torch
    from ep_server.ranks.build import RankParts

log = logging.getLogger(__name__)

REPORT_NS = 500_000_000
CHECK_NS = 10_000_000_000  # a recount of 64k KV blocks takes 40 ms: not at every pause


@dataclass(frozen=True, slots=True)
class _Flying:
    """A step that was launched. launched: the runner's. began: clock at its start, planned, voted; ns.

    bucket: 0 = as it is.
    """

    batch: StepBatch
    launched: Any
    bucket: int
    micro_batches: int
    began: tuple[int, int, int]


class RankWorker:
    """The step of one rank, and what happens between steps."""

    def __init__(
        self, parts: RankParts, channel: RankChannel, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._exchange, self._runner, self._scheduler = parts.exchange, parts.runner, parts.scheduler
        self._channel = channel
        self._clock = clock
        self._voter = Voter()
        self._overlap = parts.overlap
        limits = parts.scheduler.limits
        self._meter = StepMeter(parts.ready.rank, min(limits.max_running, limits.max_step_tokens))
        self._meter.ready(self._exchange.statistics(), self._runner.statistics())
        self._ahead = parts.scheduler.limits.ahead
        self._flying: deque[_Flying] = deque()
        self._stop = False
        self._idle = False  # no rank had anything to do in the last vote
        self._reported = self._checked = clock()
        self._read_overlap()

    def __repr__(self) -> str:
        return f"RankWorker({self._voter!r}, {self._scheduler!r})"

    def run(self) -> None:
        """Steps and parks until every rank was told to stop.

        Raises: ExchangeError, ChannelClosed; InternalError if the scheduler's books are wrong in the end.
        """
        while self.step():
            pass
        self._scheduler.check_integrity()

    def step(self) -> bool:
        """One step with all other ranks; False once it was the last.

        On exit: every message read is obeyed, and the tokens of the step are on their way to the front, or
        those of the one `ahead` steps before it. A batch that was planned when the group stopped is not run,
        nor a step in which no rank has a token: all then depends on those in flight.
        """
        start = self._clock()
        self._obey(self._channel.poll())
        batch = self._scheduler.plan()
        planned = self._clock()
        verdict = self._vote(batch)
        voted = self._clock()
        run = verdict.run and any(verdict.tokens)
        if run:
            self._meter.began(batch, planned)
            bucket = verdict.bucket if verdict.graph else 0
            count = self._runner.micro_batches_of(bucket, verdict.micro_batches)
            launched = self._runner.launch(batch, count, bucket)
            self._flying.append(_Flying(batch, launched, bucket, count, (start, planned, voted)))
        while self._flying and (len(self._flying) > self._ahead or not run):
            self._land(self._flying.popleft())
        if verdict.park and self._idle:
            self._park()
            self._idle = False
        elif verdict.park != self._idle:
            # Before one more vote: a rank that is stopped before it could say so is missed there.
            self._idle = verdict.park
            self._channel.say(waiting=verdict.park)
        return not verdict.stop

    def _land(self, step: _Flying) -> None:
        """Waits for the tokens of a step, and tells them."""
        sampled = self._runner.collect(step.launched)
        ran = self._clock()
        undrawn = [t.number for t in sampled if t.token_id == NO_TOKEN and self._scheduler.is_live(t.number)]
        self._publish(self._scheduler.commit(step.batch, sampled))
        self._fail(undrawn)
        times = StepTimes(*step.began, ran, self._clock())
        took = self._meter.stepped(step.batch, step.micro_batches, times, bucket=step.bucket)
        if self._overlap.stepped(Ran(took, step.batch.num_tokens, step.bucket, step.micro_batches)):
            self._read_overlap()
        if times.published - self._reported >= REPORT_NS:
            self._report()

    def _vote(self, batch: StepBatch) -> Verdict:
        bucket = self._runner.bucket_of(batch)
        record = self._voter.cast(
            tokens=batch.num_tokens,
            bucket=bucket,
            has_work=self._scheduler.has_work,
            micro_batch_ok=self._overlap.wish(len(batch.slices), bucket),
            graph_ok=bucket > 0 or not batch.slices,
            stop=self._stop,
        )
        return self._voter.settle(self._exchange.all_gather(record))

    def _park(self) -> None:
        """Sleeps until there is new work for some rank, or the end."""
        last_work = self._voter.last_work
        self._meter.parked(last_work)
        self._report()
        if self._clock() - self._checked >= CHECK_NS:
            self._scheduler.check_integrity()
            self._checked = self._clock()
        while self._voter.last_work == last_work and not self._stop:
            self._obey(self._channel.wait())

    def _obey(self, payloads: Sequence[bytes]) -> None:
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
            elif kind == "shutdown":
                self._stop = True
            else:
                raise InternalError(f"a message of kind {kind!r} to a running rank")

    def _add(self, wire: pb.Request) -> None:
        """A request that cannot be taken fails alone: it is not in a queue yet."""
        try:
            request = request_of(wire)
            self._runner.add(request)
            try:
                self._scheduler.add(request)
            except Exception:
                self._runner.remove(request.number)
                raise
        except Exception as error:
            log.exception("request %d", wire.number)
            failed = pb.RequestFailed(number=wire.number, message=one_line(error))
            self._send(pb.FromRank(request_failed=failed))
        else:
            self._meter.arrived(request.number, self._clock())

    def _publish(self, events: Sequence[TokenEvent]) -> None:
        if events:
            self._send(tokens_message(self._meter.with_queue_times(events)))
            for event in events:
                if event.finish is not None:
                    self._forget(event.number)
        self._release()

    def _fail(self, undrawn: Sequence[int]) -> None:
        """A request whose logits are broken fails alone: whoever sends it again must not end a server."""
        for number in undrawn:
            log.error("the logits of request %d hold NaN or infinity", number)
            failed = pb.RequestFailed(number=number, message="its logits hold NaN or infinity")
            self._forget(number)
            self._send(pb.FromRank(request_failed=failed))

    def _release(self) -> None:
        for number in self._scheduler.freed():
            self._forget(number)
            self._send(pb.FromRank(freed=pb.Freed(number=number)))

    def _forget(self, number: int) -> None:
        self._runner.remove(number)
        self._meter.left(number)

    def _read_overlap(self) -> None:
        exchange, runner = self._exchange.statistics()["sums"], self._runner.statistics().sums
        self._overlap.read(
            wait_ns=exchange.get("dispatch/wait", 0) + exchange.get("combine/wait", 0),
            compute_ns=sum(runner.values()) - runner["step/dispatch"] - runner["step/combine"],
        )

    def _report(self) -> None:
        self._reported = self._clock()
        measured = self._meter.gather(
            self._scheduler.load(), self._exchange.statistics(), self._runner.statistics()
        )
        self._send(statistics_message(measured))

    def _send(self, message: pb.FromRank) -> None:
        self._channel.send(message.SerializeToString())
