"""The vote that keeps ranks in step: each rank contributes one 64-byte record per step, and all tally them.

Anything that may differ between ranks goes through this record and nothing else. Every rank tallies the same
records, so every rank reaches the same verdict. The caller gathers the bytes over any transport.

Work numbers: the frontend numbers its requests 1, 2, 3 ... and sends every number to every rank: to one rank
with the request, to the others as a doorbell. Ranks park together, when none has work and all have seen the
same last number. Any later number then wakes all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ep_server.errors import InternalError
from ep_server.scheduler.prompt_budget import RanStep

RECORD_BYTES = 64

# magic, flags, step, generation, last work, tokens, bucket, prepared, prompts, streams, normal from; the rest
# is reserved and zero.
_RECORD = struct.Struct("<4sIQQQIIQIII4x")
_MAGIC = b"epV1"
_HAS_WORK, _MICRO_BATCH_OK, _GRAPH_OK, _STOP = 1, 2, 4, 8
assert _RECORD.size == RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's contribution for its next step.

    step: number of the step voted on. generation: of the membership; both are equal on all ranks.
    last_work: last work number seen. tokens: in the batch it plans to run, 0 if idle.
    bucket: the size its batch would be padded to. has_work: a request waits or runs here.
    micro_batch_ok, graph_ok: it can run two micro-batches, a captured graph; an idle rank always can.
    stop: it received the order to shut down. prepared: the change that it could switch to now, 0 = none.
    prompts: those of its tokens that are of prompts. streams: its sequences that prompts should not hold up.
    normal_from: tokens of the largest rank from which a step should use the exchange of many rows; 0 = it
      does not know.
    """

    step: int
    generation: int
    last_work: int
    tokens: int = 0
    bucket: int = 0
    has_work: bool = False
    micro_batch_ok: bool = True
    graph_ok: bool = True
    stop: bool = False
    prepared: int = 0
    prompts: int = 0
    streams: int = 0
    normal_from: int = 0

    def pack(self) -> bytes:
        """The 64-byte record. Raises InternalError for a number the record cannot carry."""
        flags = (
            _HAS_WORK * self.has_work
            | _MICRO_BATCH_OK * self.micro_batch_ok
            | _GRAPH_OK * self.graph_ok
            | _STOP * self.stop
        )
        try:
            return _RECORD.pack(
                _MAGIC,
                flags,
                self.step,
                self.generation,
                self.last_work,
                self.tokens,
                self.bucket,
                self.prepared,
                self.prompts,
                self.streams,
                self.normal_from,
            )
        except struct.error as error:
            raise InternalError(f"{self} does not fit its record: {error}") from error

    @staticmethod
    def unpack(record: bytes) -> Vote:
        """Raises InternalError for anything that pack() did not write."""
        if len(record) != RECORD_BYTES or record[:4] != _MAGIC:
            raise InternalError(f"not a vote: {len(record)} bytes starting with {record[:4]!r}")
        _, flags, step, generation, last_work, *counts = _RECORD.unpack(record)
        tokens, bucket, prepared, prompts, streams, normal_from = counts
        return Vote(
            step,
            generation,
            last_work,
            tokens,
            bucket,
            has_work=bool(flags & _HAS_WORK),
            micro_batch_ok=bool(flags & _MICRO_BATCH_OK),
            graph_ok=bool(flags & _GRAPH_OK),
            stop=bool(flags & _STOP),
            prepared=prepared,
            prompts=prompts,
            streams=streams,
            normal_from=normal_from,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do after the vote on `step`: at most one of run, park and stop; none = vote again.

    micro_batches: 1 or 2. graph: a captured graph of size `bucket` is run. tokens: of each live rank.
    change: that all switch to before this step, 0 = none.
    singles, prompts: of the rank with most tokens of that kind. streams: of all ranks.
    normal_from: see normal(); 0 = no rank knows.
    """

    step: int
    run: bool
    park: bool
    stop: bool
    micro_batches: int
    graph: bool
    bucket: int
    tokens: tuple[int, ...]
    change: int = 0
    singles: int = 0
    prompts: int = 0
    streams: int = 0
    normal_from: int = 0

    def normal(self, bucket: int, micro_batches: int) -> bool:
        """Whether the step uses the exchange of many rows. bucket: see ran(). micro_batches: it runs as."""
        return 0 < self.normal_from <= -(-(bucket or max(self.tokens)) // micro_batches)

    def ran(self, ns: int, bucket: int) -> RanStep:
        """The step, for the scheduler. bucket: rows that a captured step was padded to; 0 = not captured."""
        return RanStep(ns, bucket or max(self.tokens), self.singles, self.prompts)


def tally(votes: Sequence[Vote]) -> Verdict:
    """Combines the votes of all ranks, in rank order.

    Stop wins over work once every rank has the order to stop. While only some have it, none parks: nothing
    would wake those that have it. Ranks switch to a change only if all have prepared that same one.

    Raises: InternalError if there is no vote, or steps or generations differ.
    """
    if not votes:
        raise InternalError("a vote without ranks")
    first = votes[0]
    for rank, vote in enumerate(votes):
        if (vote.step, vote.generation) != (first.step, first.generation):
            raise InternalError(
                f"rank {rank} votes on step {vote.step} of generation {vote.generation}, "
                f"rank 0 on step {first.step} of generation {first.generation}"
            )
    stop = all(vote.stop for vote in votes)
    run = any(vote.has_work for vote in votes) and not stop
    agreed = all(vote.prepared == first.prepared for vote in votes) and not stop
    quiet = all(vote.last_work == first.last_work and not vote.stop for vote in votes)
    return Verdict(
        step=first.step,
        run=run,
        park=quiet and not run,
        stop=stop,
        micro_batches=2 if all(vote.micro_batch_ok for vote in votes) else 1,
        graph=all(vote.graph_ok for vote in votes),
        bucket=max(vote.bucket for vote in votes),
        tokens=tuple(vote.tokens for vote in votes),
        change=first.prepared if agreed else 0,
        singles=max(vote.tokens - vote.prompts for vote in votes),
        prompts=max(vote.prompts for vote in votes),
        streams=sum(vote.streams for vote in votes),
        normal_from=max(vote.normal_from for vote in votes),
    )


class Voter:
    """One rank's end of the vote: counts steps and remembers the last work number. One thread calls it.

    A rank's loop: read messages (`saw` for each work number), plan, gather `cast(...)`, act on
    `decide(records)`. A parked rank waits for a work number or the order to stop, then votes on the next
    step. A message that only some ranks get, such as a cancel, must not wake it: it would vote alone.
    """

    def __init__(self, generation: int = 0, last_work: int = 0) -> None:
        self.generation = generation
        self.step = 0
        self.last_work = last_work
        self.elsewhere = self._streams = 0  # Vote.streams: of the other ranks, of this one

    def __repr__(self) -> str:
        return f"Voter(step={self.step}, last_work={self.last_work}, generation={self.generation})"

    def saw(self, work_number: int) -> None:
        """Records a work number. Raises InternalError if it is not newer than the last."""
        if work_number <= self.last_work:
            raise InternalError(f"work number {work_number} after {self.last_work}")
        self.last_work = work_number

    def cast(
        self,
        *,
        tokens: int,
        has_work: bool,
        bucket: int = 0,
        micro_batch_ok: bool = True,
        graph_ok: bool = True,
        stop: bool = False,
        prepared: int = 0,
        prompts: int = 0,
        streams: int = 0,
        normal_from: int = 0,
    ) -> bytes:
        """This rank's record for its current step; arguments as the fields of Vote."""
        self._streams = streams
        return Vote(
            self.step,
            self.generation,
            self.last_work,
            tokens,
            bucket,
            has_work=has_work,
            micro_batch_ok=micro_batch_ok,
            graph_ok=graph_ok,
            stop=stop,
            prepared=prepared,
            prompts=prompts,
            streams=streams,
            normal_from=normal_from,
        ).pack()

    def decide(self, records: Sequence[bytes]) -> Verdict:
        """Tallies the gathered records, in rank order, and moves to the next step.

        records: that of an absent rank is empty.
        Raises: InternalError if a record is no vote, or not on this rank's step and generation.
        """
        verdict = tally([Vote.unpack(record) for record in records if record])
        if verdict.step != self.step:
            raise InternalError(f"the vote is on step {verdict.step}, this rank is at {self.step}")
        self.step += 1
        self.elsewhere = verdict.streams - self._streams
        return verdict
