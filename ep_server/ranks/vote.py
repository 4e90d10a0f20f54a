"""The vote that keeps ranks in step: one 64-byte record per rank and step, and what all conclude from it.

Anything that may differ between ranks goes through this record and through nothing else; every rank tallies
the same records, so every rank reaches the same verdict. Knows no transport: the caller gathers the bytes.

Work numbers: the front numbers its requests 1, 2, 3 ... and tells every rank each number, one of them with
the request and the others as a doorbell. Ranks park together, when nobody has work and all have seen the
same last number: any later number then reaches, and wakes, every one of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ep_server.errors import InternalError

RECORD_BYTES = 64

# magic, flags, step, generation, last work, tokens, bucket; the rest is reserved and zero.
_RECORD = struct.Struct("<4sIQQQII24x")
_MAGIC = b"epV1"
_HAS_WORK, _MICRO_BATCH_OK, _GRAPH_OK, _STOP = 1, 2, 4, 8
assert _RECORD.size == RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says about its next step.

    step: number of the step voted on. generation: of the membership; both are equal on all ranks.
    last_work: last work number seen. tokens: it would run, 0 if idle.
    bucket: size its buffers or graph would be padded to. has_work: some request waits or runs here.
    micro_batch_ok, graph_ok: it could run two micro-batches, a captured graph; an idle rank always can.
    stop: it was told to end.
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
                _MAGIC, flags, self.step, self.generation, self.last_work, self.tokens, self.bucket
            )
        except struct.error as error:
            raise InternalError(f"{self} does not fit its record: {error}") from error

    @staticmethod
    def unpack(record: bytes) -> Vote:
        """Raises InternalError for anything that pack() did not write."""
        if len(record) != RECORD_BYTES or record[:4] != _MAGIC:
            raise InternalError(f"not a vote: {len(record)} bytes starting with {record[:4]!r}")
        _, flags, step, generation, last_work, tokens, bucket = _RECORD.unpack(record)
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
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do after the vote on `step`. At most one of run, park and stop; none = vote again.

    micro_batches: 1 or 2. graph: a captured graph of size `bucket` is run. tokens: by rank.
    """

    step: int
    run: bool
    park: bool
    stop: bool
    micro_batches: int
    graph: bool
    bucket: int
    tokens: tuple[int, ...]


def tally(votes: Sequence[Vote]) -> Verdict:
    """Concludes from the votes of all ranks, in rank order.

    Stop wins over work once every rank was told to stop. While only some were, none parks: a rank that was
    told would not be woken again.

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
    )


class Voter:
    """One rank's end of the vote: counts steps and remembers the last work number. One thread calls it.

    The loop of a rank: read messages (`saw` for each work number), plan, gather `cast(...)`, obey
    `settle(records)`. A parked rank waits for a work number or the order to stop, then votes on the next;
    a message that not all ranks get, such as a cancel, must not wake it: it would vote alone.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.step = 0
        self.last_work = 0

    def __repr__(self) -> str:
        return f"Voter(step={self.step}, last_work={self.last_work}, generation={self.generation})"

    def saw(self, work_number: int) -> None:
        """Notes a work number, with its request or as a doorbell. Raises InternalError if it is not newer."""
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
    ) -> bytes:
        """The record of this rank for the step it is at; arguments as the fields of Vote."""
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
        ).pack()

    def settle(self, records: Sequence[bytes]) -> Verdict:
        """Tallies the gathered records, in rank order, and moves to the next step.

        Raises: InternalError if a record is no vote, or not on this rank's step and generation.
        """
        verdict = tally([Vote.unpack(record) for record in records])
        if verdict.step != self.step:
            raise InternalError(f"the vote is on step {verdict.step}, this rank is at {self.step}")
        self.step += 1
        return verdict
