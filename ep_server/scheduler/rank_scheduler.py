"""[4] Continuous batching on one rank: plans the next step and applies its result.

It decides from counts alone, and one thread calls it. The rank's loop: add and cancel as commands arrive,
`batch = plan()`, run the batch, `commit(batch, sampled)`, repeat.

With `limits.ahead`, the next plan() may precede the commit of the running step. A sequence then continues
with PENDING_TOKEN, and results for a sequence that has ended are dropped. Steps run in the order of their
plans, so a released block may be planned for another sequence at once. Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ep_server.errors import InternalError
from ep_server.records import (
    LATE_TOKEN,
    KvBlocksStored,
    KvEvent,
    KvMoves,
    RankLoad,
    Request,
    SampledToken,
    SeqSlice,
    StepBatch,
    TokenEvent,
)
from ep_server.scheduler.batch import IDLE, SchedulerLimits
from ep_server.scheduler.host_tier import HostTier
from ep_server.scheduler.kv_blocks import BlockLedger
from ep_server.scheduler.kv_events import KvEventLog
from ep_server.scheduler.kv_tables import KvTables
from ep_server.scheduler.lifecycle import Event
from ep_server.scheduler.prompt_budget import PromptBudget
from ep_server.scheduler.queues import WaitingQueue, overtake
from ep_server.scheduler.sequence import ScheduledSequence, StepsInFlight
from ep_server.scheduler.siblings import Siblings


class RankScheduler:
    """Queue, running sequences and KV blocks of one rank.

    A step runs every decoding sequence first, then prefill chunks with the tokens that are left, best order
    first: of equal priorities short prompts precede long ones. `limits.itl_budget_ns` bounds what prompts add
    to the time of a step. A sequence is admitted when its whole prompt fits, plus one block for each running
    sequence. When decoding runs out of blocks, the most junior gives its blocks back and is computed again
    later; it keeps its tokens, and none is emitted twice. Of the sequences of one request the first prefills
    the prompt; the others share its blocks. A prompt waits while a step computes its next block for another.
    """

    def __init__(self, limits: SchedulerLimits, weights: int = 0) -> None:
        self.limits, self.weights = limits, weights
        self._ledger = BlockLedger(limits.kv_blocks, limits.block_size)
        self._host = HostTier(limits.host_blocks, self._ledger)
        self._tables = KvTables(self._ledger, weights, self._host)
        self.handoffs, self.lost = self._tables.handoffs, self._ledger.lost
        self._waiting = WaitingQueue(limits.max_overtakes)
        self._siblings = Siblings()
        # Every running sequence gets at least one token of a step, or a long decode would stall a prefill.
        self._max_running = min(limits.max_running, limits.max_step_tokens)
        self._decoding: list[ScheduledSequence] = []
        self._prefilling: list[ScheduledSequence] = []
        self._live: dict[int, ScheduledSequence] = {}
        self._offering: list[ScheduledSequence] = []  # whose prefix others of this plan wait for
        self._in_flight = self.handoffs.in_flight = StepsInFlight(limits.ahead)
        self.budget = PromptBudget(limits)
        self.streams = 0  # of the last plan: sequences that prompts should not hold up
        self._plans, self._blocked = 0, False  # blocked: the last plan had no place for the head of the queue
        self._freed: list[int] = []
        self._arrivals = self._steps = self._preemptions = 0

    def __repr__(self) -> str:
        return (
            f"RankScheduler(decoding={len(self._decoding)}, prefilling={len(self._prefilling)}, "
            f"waiting={len(self._waiting)}, {self._ledger!r})"
        )

    @property
    def has_work(self) -> bool:
        """At least one request waits or runs."""
        return bool(self._live)

    @property
    def running(self) -> int:
        """Sequences that hold KV blocks, in prefill or decode."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def live(self) -> frozenset[int]:
        """Numbers of the requests that wait or run."""
        return frozenset(self._live)

    def is_live(self, number: int) -> bool:
        """A request of this number waits or runs."""
        return number in self._live

    def load(self) -> RankLoad:
        """The state now; cumulative counts since construction."""
        return RankLoad(
            running=self.running,
            waiting=len(self._waiting) + len(self._siblings),
            kv_blocks_used=self._ledger.used,
            kv_blocks_total=self._ledger.num_blocks,
            kv_blocks_cached=self._ledger.cached,
            kv_blocks_held=self.handoffs.held,
            steps=self._steps,
            prefix_queries=self._tables.queries,
            prefix_hits=self._tables.hits,
            preemptions=self._preemptions,
            prefix_host_hits=self._tables.host_hits,
            host_blocks_total=self._host.slots.num_slots,
            host_blocks_used=self._host.slots.used,
        )

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidArgument: empty prompt, max_new_tokens < 1 or min_new_tokens > max_new_tokens.
            ContextLengthExceeded: it can never fit the context or the KV blocks of this rank.
            InternalError: its number is in use.
        """
        self.limits.check(request)
        if request.number in self._live:
            raise InternalError(f"request number {request.number} is already on this rank")
        limits, size = self.limits, self.limits.size_of(request)
        seq = ScheduledSequence(request, self._arrivals, limits.block_size, limits.prefix_cache, size)
        self._arrivals += 1
        seq.since = 0 if seq.continues else self._plans + 1
        self._live[seq.number] = seq
        self.handoffs.open(seq)
        if self._siblings.join(seq):
            self._waiting.push(seq)

    def cancel(self, number: int) -> bool:
        """Ends a request: now, or at commit if it is in the step in flight. No event of it follows.

        Returns: True if freed() will name it, once; False if it is unknown: never here, or ended already.
        """
        return self._drop(number, Event.CANCEL)

    def fail(self, number: int) -> bool:
        """As cancel(), for a request that cannot be run; freed() does not name it."""
        return self._drop(number, Event.FAIL)

    def hold(self, number: int) -> None:
        """Keeps a request out of the steps to come; it keeps its blocks. Unknown numbers are ignored."""
        if number in self._live:
            self._live[number].held = True

    def release(self, number: int) -> None:
        """Ends hold()."""
        if number in self._live:
            self._live[number].held = False

    def freed(self) -> list[int]:
        """Numbers of cancelled requests whose blocks came back since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def flush_cache(self, weights: int | None = None) -> int:
        """Forgets every prefix: nothing computed so far is found by a later request. Returns: blocks.

        Running sequences keep their blocks and offer none until they are placed again. weights: new version.
        """
        self.weights = self._tables.weights = self.weights if weights is None else weights
        self.lost.forget_all()
        return self._tables.forget_all(self._decoding + self._prefilling)

    def watch_cache(self, *, on: bool) -> None:
        """Begins or ends to keep what cache_events() returns."""
        self._ledger.log = KvEventLog() if on else None

    def cache_events(self) -> list[KvEvent]:
        """Changes of the prefix cache since the last call, oldest first; empty where nobody watches."""
        return [] if self._ledger.log is None else self._ledger.log.take()

    def cache_contents(self) -> list[KvBlocksStored]:
        """Every block that a later request may share, parents before children."""
        return self._ledger.sealed()

    def plan(self, elsewhere: int = 0) -> StepBatch:
        """The next step; empty when nothing can run, or when everything depends on tokens in flight.

        Up to `limits.ahead` non-empty steps may be uncommitted before it.
        elsewhere: `streams` of the other ranks in the last step: steps take equally long on all ranks.
        `blocks` of a slice is the live table: it covers the slice, may reach past it, and changes with the
        next plan() or commit().
        Raises: InternalError if a commit() must come first.
        """
        self._in_flight.make_room()
        self._host.begin_plan()
        self._plans += 1
        going = [seq for seq in self._decoding if seq.runs_on and not seq.held]
        self._grow(going)
        going = [seq for seq in going if not seq.waits]  # the others were preempted
        slices = [seq.single() for seq in going]
        num_tokens = self.streams = len(slices)
        if self._prefilling or self._waiting:
            num_tokens += self._plan_prefill(slices, going, elsewhere)
        for seq, piece in zip(going, slices, strict=True):
            seq.planned = piece.start + len(piece.token_ids)
            seq.pending += piece.sample
        self._move_prefilled()
        batch = StepBatch(tuple(slices), num_tokens) if slices else IDLE
        self._in_flight.push(batch, going, self._tables.take_offered())
        return batch

    def moves(self) -> KvMoves | None:
        """Copies that must be started before the step that was planned last; None: nothing to do."""
        return self._host.take_moves()

    def loaded(self, tickets: Sequence[int]) -> None:
        """These loads of moves(), or fetches of `handoffs`, have ended: their sequences run from now on."""
        self._tables.loaded(tickets)

    def commit(self, batch: StepBatch, sampled: Sequence[SampledToken]) -> list[TokenEvent]:
        """Applies a finished step: counts its tokens as computed, appends drawn ones, frees what ended.

        Args:
            batch: the oldest batch that plan() returned and that is not committed.
            sampled: one token per slice with `sample`, in slice order.
                A request with NO_TOKEN ends as by fail(). With LATE_TOKEN its last token runs again; it must
                have been on hold() since that step was planned.
        Returns: one event per drawn token of a request that goes on or ends by it, in slice order.
        Raises: InternalError if batch or tokens are not those awaited; nothing has changed then.
        """
        step = self._in_flight.pop(batch, sampled)
        self._steps += 1
        events: list[TokenEvent] = []
        tokens = iter(sampled)
        for (seq, admissions), piece in zip(step.members, batch.slices, strict=True):
            token = next(tokens) if piece.sample else None
            if seq.state.ended:  # by a step before, when this one was planned already
                continue
            if not seq.waits and seq.admissions == admissions:
                late = token is not None and token.token_id == LATE_TOKEN
                seq.computed = piece.start + len(piece.token_ids) - late
                seq.planned -= late
                if seq.computed >= seq.next_full:
                    self._tables.filled(seq)
            event = seq.take(token) if token is not None else None
            if event is not None:
                events.append(event)
            if seq.drop is not None:
                self._end(seq, seq.drop)
            elif event is not None and event.finish is not None:
                self._end(seq, Event.FINISH)
        return events

    def drop_steps(self) -> None:
        """Forgets the steps in flight: they did not end. What they were to compute is planned again."""
        unwritten = self._in_flight.unwritten
        dropped = [seq for seq in self._in_flight.drop() if not seq.state.ended]
        if unwritten:
            self._tables.forget_all(self._decoding + self._prefilling)
        for seq in self._decoding + self._prefilling:
            if unwritten & set(seq.blocks[: seq.computed // seq.block_size]):
                self._preempt(seq)
        for seq in dropped:
            if not seq.waits:
                seq.planned = seq.computed
                if seq in self._decoding and seq.computed + 1 < len(seq.tokens):
                    self._decoding.remove(seq)
                    self._prefilling.append(seq)
            if seq.drop is not None:
                self._end(seq, seq.drop)

    def check_integrity(self) -> None:
        """Raises InternalError if queues, tables, counts or states disagree. For tests and idle moments."""
        for part in (self._waiting, self._siblings, self._host.slots):
            part.check_integrity()
        running = self._decoding + self._prefilling
        self._ledger.check_integrity([*(seq.blocks for seq in running), *self.handoffs.tables()])
        if len(running) + len(self._waiting) + len(self._siblings) != len(self._live):
            raise InternalError(f"{len(self._live)} live requests, but {self!r}")
        if len(running) > self._max_running:
            raise InternalError(f"more than {self._max_running} running in {self!r}")
        for seq in running:
            if seq.waits or seq.state.ended or self._live.get(seq.number) is not seq:
                raise InternalError(f"{seq!r} is among the running")
            seq.check_integrity(in_flight=seq in self._in_flight, decodes=seq in self._decoding)

    def _grow(self, going: Sequence[ScheduledSequence]) -> None:
        """Gives each of them room for its next token, preempting the last in order if need be."""
        short = [seq for seq in going if seq.planned == seq.capacity]
        while len(short) > self._ledger.available:
            if self.handoffs.give_up():  # rather than to compute a sequence again
                continue
            victim = max(self._decoding + self._prefilling, key=lambda seq: seq.seniority)
            self._preempt(victim)
            short = [seq for seq in short if seq is not victim]
        for seq in short:
            self._tables.extend(seq)

    def _plan_prefill(self, slices: list[SeqSlice], going: list[ScheduledSequence], elsewhere: int) -> int:
        """Adds prefill chunks, best order first, admitting while there is room; returns their tokens."""
        continuing = any(seq.continues and seq.loading >= 0 for seq in self._prefilling)  # no others beside
        begun = [seq for seq in self._prefilling if not seq.loading and seq.continues >= continuing]
        begun.sort(key=lambda seq: seq.order)
        prompts = len(begun) + (0 if self._blocked else len(self._waiting))
        first = min([*begun[:1], *self._waiting.first], key=lambda seq: seq.order, default=None)
        self.streams, room = self.budget.room(going, first, prompts, elsewhere)
        singles, tokens, self._blocked = len(going), 0, False
        later = list[ScheduledSequence]()
        while room.tokens:
            head = None if self._blocked else self._waiting.candidate(continuing=continuing)
            if head is not None and (not begun or head.order < begun[0].order):
                if maker := self._tables.maker_of(head, going[singles:]):
                    self._offering.append(maker)
                    later.append(head)
                    self._waiting.remove(head)
                    continue
                self._blocked = not self._admit(head)
                continuing |= head.continues and not self._blocked
                if self._blocked and not head.continues:
                    head.since = self._plans + 1
                if self._blocked or head.loading:
                    continue
                seq = head
                overtake(begun, seq, self.limits.max_overtakes)
            elif begun and (begun[0].continues or not continuing):
                seq = begun.pop(0)
            else:
                break
            chunk = seq.chunk(room.fit(seq.planned, seq.to_run))
            slices.append(chunk)
            going.append(seq)
            room.take(chunk.start, len(chunk.token_ids))
            tokens += len(chunk.token_ids)
        self._queue(later)
        return tokens

    def _admit(self, seq: ScheduledSequence) -> bool:
        """Admits the head of the queue and allocates its blocks; False if it must wait."""
        running = self.running
        if running >= self._max_running or seq.pending:  # preempted in the middle: tokens are pending
            return False
        if not self._tables.place(seq, spare=running):
            self._waiting.refuse()
            return False
        self._waiting.take()
        seq.refused = False
        seq.advance(Event.ADMIT)
        seq.admissions += 1
        self._prefilling.append(seq)
        return True

    def _move_prefilled(self) -> None:
        while self._offering:
            seq = self._offering.pop()
            self._tables.seal(seq, seq.planned)
        done = [seq for seq in self._prefilling if seq.planned == len(seq.tokens)]
        if done:
            self._decoding += done
            self._prefilling = [seq for seq in self._prefilling if seq not in done]
        for seq in done:
            seq.began = min(seq.began, self._plans)
            if self._siblings.awaits(seq):
                self._tables.seal(seq, len(seq.request.prompt_ids))
                self._queue(self._siblings.prefilled(seq))

    def _preempt(self, seq: ScheduledSequence) -> None:
        seq.advance(Event.PREEMPT)
        self._preemptions += 1
        self._leave_running(seq)
        self._waiting.push(seq)

    def _drop(self, number: int, event: Event) -> bool:
        seq = self._live.get(number)
        if seq is None:
            return False
        if seq in self._in_flight:
            seq.drop = seq.drop or event
        else:
            self._end(seq, event)
        return True

    def _end(self, seq: ScheduledSequence, event: Event) -> None:
        if not seq.waits:
            self._leave_running(seq, finished=event is Event.FINISH)
        elif not self._siblings.holds(seq):
            self._waiting.remove(seq)
        if event is not Event.FINISH:
            self.handoffs.abandon(seq)
        seq.advance(event)
        del self._live[seq.number]
        self._queue(self._siblings.leave(seq))
        if seq.shares and self._siblings.is_last(seq):
            self._tables.forget(seq)
        if event is Event.CANCEL:
            self._freed.append(seq.number)

    def _queue(self, released: Sequence[ScheduledSequence]) -> None:
        for seq in released:
            self._waiting.push(seq)

    def _leave_running(self, seq: ScheduledSequence, *, finished: bool = False) -> None:
        (self._decoding if seq in self._decoding else self._prefilling).remove(seq)
        self._tables.release(seq, finished=finished)
