"""Scheduler state of a request, and the steps that were planned but not committed, oldest first.

Data only: the rules are in rank_scheduler.

Units: tokens, blocks.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ep_server.errors import InternalError
from ep_server.records import (
    LATE_TOKEN,
    NO_TOKEN,
    PENDING_TOKEN,
    FinishReason,
    Request,
    SampledToken,
    ScoredRows,
    SeqSlice,
    StepBatch,
    TokenEvent,
)
from ep_server.scheduler.kv_blocks import block_digests, private_root, root_digest
from ep_server.scheduler.lifecycle import Event, State, advance

NEVER = sys.maxsize


@dataclass(slots=True, eq=False, repr=False)
class ScheduledSequence:
    """One request on its rank, from add() to its end.

    arrival: its place in the order of add(). caches: reads and fills the prefix cache.
    size: of its prompt, as SchedulerLimits.size_of() says; -1 where `continues`.
    continues: a rank was lost that had drawn tokens of it. Its stream waits longer than any new one.
    shares: the prompt's blocks, with the other sequences of its request.
    stops: token ids that end it once len(tokens) reaches earliest_stop; length_limit ends it in any case.
    tokens: prompt, then every token drawn so far. A preempted sequence keeps them.
    blocks: its KV table, empty while it waits. capacity = len(blocks) * block_size.
    computed: leading tokens whose keys and values are in the cache.
    planned: the same once the steps in flight have run. pending: tokens that they draw for it.
    admissions: times it was given blocks. to_run: tokens that were not computed then; NEVER where positions
      of the prompt are to be scored.
    scored: leading prompt positions that need not be scored any more: the step that does it is planned.
    score_end: the same once all are. It reads no block of the prefix cache beyond `scored`.
    sealed: leading full blocks offered to the prefix index. named: the same that others find if the rank is
      lost.
    next_full: `computed` at which one more is full; NEVER where it is neither offered nor named.
    flushed: its blocks are older than the last flush, so it offers none.
    cached_tokens: prompt tokens its first admission found in the prefix cache; None before it.
    refused: was head of the queue and did not fit, so that no shorter prompt may take its room.
    urgent: was overtaken too often; precedes every priority.
    loading: ticket of the load from host memory, of the copy from a lost rank, or of the fetch from another
      server, that it waits for; 0 = none. fetched: a fetch has ended; no second one is tried.
    drop: cancel or failure that waits for the step in flight.
    held: it takes part in no step until it is released.
    weights: version of those in force when it was given blocks; their digests tell versions apart.
    since: number of the first plan that could run its prompt, 0 where `continues`. began: of the plan that
      first drew for it.
    """

    request: Request
    arrival: int
    block_size: int
    caches: bool
    size: int
    number: int = field(init=False)
    continues: bool = field(init=False)
    shares: bool = field(init=False)
    stops: frozenset[int] = field(init=False)
    earliest_stop: int = field(init=False)
    length_limit: int = field(init=False)
    tokens: list[int] = field(init=False)
    score_end: int = field(init=False)
    state: State = State.QUEUED
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0
    computed: int = 0
    planned: int = 0
    pending: int = 0
    admissions: int = 0
    to_run: int = 0
    scored: int = 0
    sealed: int = 0
    named: int = 0
    next_full: int = NEVER
    flushed: bool = False
    cached_tokens: int | None = None
    overtaken: int = 0
    refused: bool = False
    urgent: bool = False
    loading: int = 0
    fetched: bool = False
    drop: Event | None = None
    held: bool = False
    weights: int = 0
    since: int = 0
    began: int = NEVER
    _digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        stopping = self.request.stopping
        self.number = self.request.number
        self.continues = bool(self.request.output_ids)
        self.size = -1 if self.continues else self.size
        self.caches = self.caches and not self.request.bypass_prefix_cache
        self.stops = stopping.eos_token_ids | stopping.stop_token_ids
        prompt = len(self.request.prompt_ids)
        self.tokens = [*self.request.prompt_ids, *self.request.output_ids]
        self.earliest_stop = prompt + stopping.min_new_tokens
        self.length_limit = prompt + stopping.max_new_tokens
        self.shares = self.request.group > 0 and prompt > self.block_size
        self.score_end = 0 if self.request.sampling.prompt_logprobs is None else prompt - 1

    def __repr__(self) -> str:
        return (
            f"ScheduledSequence({self.number}, {self.state}, tokens={len(self.tokens)}, "
            f"computed={self.computed}, blocks={len(self.blocks)})"
        )

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Sort key of prompts: urgent ones by arrival, then by priority, then by size, then by arrival."""
        if self.urgent:
            return (False, 0, 0, self.arrival)
        return (True, -self.request.priority, 0 if self.refused else self.size, self.arrival)

    @property
    def seniority(self) -> tuple[bool, int, int]:
        """Sort key of what runs: the last gives its blocks back first, however long its prompt is."""
        return (not self.urgent, 0 if self.urgent else -self.request.priority, self.arrival)

    @property
    def runs_on(self) -> bool:
        """It needs another step as far as its length says; the steps in flight may draw a stop."""
        return len(self.tokens) + self.pending < self.length_limit

    @property
    def next_id(self) -> int:
        """The token that a decode step runs."""
        return PENDING_TOKEN if self.pending else self.tokens[-1]

    def single(self) -> SeqSlice:
        """What a decode step runs of it."""
        return SeqSlice(self.number, self.planned, (self.next_id,), self.blocks, True, self.admissions)

    def chunk(self, most: int) -> SeqSlice:
        """The next tokens of its prompt, up to `most`, for a step that is run."""
        start, end = self.planned, min(self.planned + most, len(self.tokens))
        ids, last, scored = self.tokens[start:end], end == len(self.tokens), self.score(start, end)
        return SeqSlice(self.number, start, ids, self.blocks, last, self.admissions, scored)

    def begin_at(self, computed: int) -> None:
        """It has blocks, and so many leading tokens need not run."""
        self.computed = self.planned = computed
        self.to_run = NEVER if self.scored < self.score_end else len(self.tokens) - computed

    @property
    def waits(self) -> bool:
        """It is in the waiting queue."""
        return self.state in (State.QUEUED, State.PREEMPTED)

    def advance(self, event: Event) -> None:
        """Moves along the lifecycle table. Raises IllegalTransition."""
        self.state = advance(self.state, event, self.number)

    def digests(self, count: int) -> list[bytes]:
        """Digests of the first `count` blocks, all of them full; computed once each."""
        size, known = self.block_size, len(self._digests)
        if known < count:
            parent = self._digests[-1] if known else self._root()
            self._digests += block_digests(parent, self.tokens[known * size : count * size], size)
        return self._digests[:count]

    def renew(self, weights: int) -> None:
        """It has no blocks; those that it gets have digests of this version of weights."""
        self.weights = weights
        self._digests.clear()

    def _root(self) -> bytes:
        if self.caches:
            return root_digest(self.request.cache_salt, self.weights)
        return private_root(self.request.request_id, self.weights)

    @property
    def reusable(self) -> int:
        """Leading tokens whose blocks it may find: in the prefix cache, or among those of its request.

        The last token is always run, cached or not: its logits are what the step is for.
        """
        return self.skippable if self.caches or self.shares else 0

    @property
    def skippable(self) -> int:
        """Leading tokens that no step must run, if their blocks are there."""
        return len(self.tokens) - 1 if self.scored >= self.score_end else self.scored

    def score(self, start: int, end: int) -> ScoredRows | None:
        """Which of the positions `start` to `end` the next step scores. Call it for a step that is run."""
        first, last = max(start, self.scored), min(end, self.score_end)
        top = self.request.sampling.prompt_logprobs
        if first >= last or top is None:
            return None
        self.scored = last
        return ScoredRows(first, self.tokens[first + 1 : last + 1], top)

    @property
    def unwritten(self) -> frozenset[int]:
        """Blocks that it offered to others and that only the steps in flight compute."""
        return frozenset(self.blocks[self.computed // self.block_size : self.sealed])

    def check_integrity(self, *, in_flight: bool, decodes: bool) -> None:
        """Raises InternalError if its numbers disagree. For one that runs; in_flight: it is in a step."""
        if decodes and self.planned != len(self.tokens) - 1 + self.pending:
            raise InternalError(f"{self!r} decodes with more than one token to run")
        if self.capacity != len(self.blocks) * self.block_size or self.planned > self.capacity:
            raise InternalError(f"{self!r} has a capacity of {self.capacity} tokens")
        if self.computed >= len(self.tokens) or len(self.tokens) >= self.length_limit:
            raise InternalError(f"{self!r} has nothing to run")
        if self.computed > self.planned or (self.computed != self.planned and not in_flight):
            raise InternalError(f"{self!r} has {self.planned} tokens planned and no step in flight")

    def take(self, token: SampledToken) -> TokenEvent | None:
        """Appends a token that a step drew. Returns: the event to publish."""
        self.pending -= 1
        if token.token_id == LATE_TOKEN:
            return None
        if token.token_id == NO_TOKEN:
            self.drop = self.drop or Event.FAIL
            return None
        finish = self.append(token.token_id)
        if self.drop is not None:
            return None
        cached = self.cached_tokens or 0
        return TokenEvent(self.number, token.token_id, token.logprob, token.top, finish, cached)

    def append(self, token_id: int) -> FinishReason | None:
        """Appends a drawn token. Returns the finish reason if it is the last one."""
        position = len(self.tokens)
        self.tokens.append(token_id)
        if token_id in self.stops and position >= self.earliest_stop:
            eos = token_id in self.request.stopping.eos_token_ids
            return FinishReason.EOS if eos else FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if position + 1 >= self.length_limit else None


@dataclass(frozen=True, slots=True)
class Step:
    """One planned batch. members: the sequence of each slice, and how often it had been admitted then.

    offered: blocks that others may share since it was planned; it computes them, or a step before it.
    """

    batch: StepBatch
    members: tuple[tuple[ScheduledSequence, int], ...]
    offered: frozenset[int] = frozenset()


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

    @property
    def unwritten(self) -> frozenset[int]:
        """Blocks that others share already, and that these steps compute."""
        return frozenset().union(*(step.offered for step in self._steps))

    def push(
        self,
        batch: StepBatch,
        members: Sequence[ScheduledSequence],
        offered: frozenset[int] = frozenset(),
    ) -> None:
        """Adds the step that was planned last."""
        self._steps.append(Step(batch, tuple((seq, seq.admissions) for seq in members), offered))

    def pop(self, batch: StepBatch, sampled: Sequence[SampledToken]) -> Step:
        """Takes the oldest step out.

        Raises: InternalError if that is not `batch`, or the tokens are not its own; nothing has changed then.
        """
        while batch.slices and self._steps and not self._steps[0].batch.slices:
            self._steps.popleft()  # idle and not committed
        if not self._steps or batch is not self._steps[0].batch:
            raise InternalError("commit() of a batch that is not in flight")
        awaited, given = [s.number for s in batch.slices if s.sample], [token.number for token in sampled]
        if given != awaited:
            raise InternalError(f"commit() of tokens for requests {given}, awaited for {awaited}")
        return self._steps.popleft()

    def drop(self) -> list[ScheduledSequence]:
        """Takes all steps out, and back what they were to draw and to score. Returns: their sequences."""
        members: dict[int, ScheduledSequence] = {}
        for step in reversed(self._steps):
            for (seq, _), piece in zip(step.members, step.batch.slices, strict=True):
                members[seq.number] = seq
                seq.pending -= piece.sample
                if piece.scored is not None:
                    seq.scored = piece.scored.start
        self._steps.clear()
        return list(members.values())

    def __contains__(self, seq: ScheduledSequence) -> bool:
        return any(seq is member for step in self._steps for member, _ in step.members)
