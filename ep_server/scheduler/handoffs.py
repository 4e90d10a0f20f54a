"""KV blocks on their way between servers: those kept for another one, and those awaited from another one.

A sequence whose request has a `hold` key may be read by another server from its first computed token on. Once
it has finished, its blocks are held: they stay as they are until they are released, or given up because a
sequence needs them. Units: tokens, blocks.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from ep_server.errors import InternalError
from ep_server.records import KvSource
from ep_server.scheduler.kv_blocks import BlockLedger
from ep_server.scheduler.sequence import ScheduledSequence, StepsInFlight


class HoldEnd(StrEnum):
    """Why blocks are not held any more.

    fetched: by a decode server. unneeded: it says that it does not need them. expired: nobody came in time.
    released: by a caller. given_up: a sequence needed the room. flushed: nothing computed so far may be used.
    """

    FETCHED = "fetched"
    UNNEEDED = "unneeded"
    EXPIRED = "expired"
    RELEASED = "released"
    GIVEN_UP = "given_up"
    FLUSHED = "flushed"


class KvFetch(NamedTuple):
    """Blocks to fill from another server; their sequence runs afterwards. ticket: below 0.

    first: the position of their first token. tokens: to fetch; the last block may get more room than that.
    Without blocks, the other server may free its own; ticket 0.
    """

    ticket: int
    source: KvSource
    first: int
    blocks: tuple[int, ...]
    tokens: int


class KvExport(NamedTuple):
    """KV blocks that another server may fetch by `key`: those of the first `tokens` tokens are computed.

    held: the request has finished, and nothing else uses its blocks. planned: tokens once the steps in flight
    have run.
    """

    number: int
    key: bytes
    tokens: int
    blocks: tuple[int, ...]
    held: bool
    planned: int = 0


class Handoffs:
    """Of one rank. in_flight: its steps. ends: holds that have ended, by why."""

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self.in_flight = StepsInFlight(0)
        self._open: dict[int, ScheduledSequence] = {}  # by number: not finished
        self._held: dict[int, KvExport] = {}  # by number, oldest first
        self._fetches: list[KvFetch] = []
        self._dropped: list[int] = []
        self._arrived: dict[int, int] = {}  # ticket -> tokens
        self._tickets = 0
        self.ends: Counter[HoldEnd] = Counter()

    @property
    def held(self) -> int:
        """Blocks that are held, and that no sequence uses."""
        return self._ledger.only_in(self.tables())

    def tables(self) -> list[tuple[int, ...]]:
        """Of the sequences that are held."""
        return [export.blocks for export in self._held.values()]

    def open(self, seq: ScheduledSequence) -> None:
        """A request arrives. Its blocks may be read by another server if it says so."""
        if seq.request.hold:
            self._open[seq.number] = seq

    def exports(self) -> list[KvExport]:
        """What another server may read now. What was listed before and is not now must not be read."""
        for number in [number for number, seq in self._open.items() if seq.state.ended or seq.flushed]:
            del self._open[number]
        unwritten = self.in_flight.unwritten if self._open else frozenset[int]()
        exports = [_export(seq, tuple(seq.blocks), unwritten) for seq in self._open.values()]
        return exports + list(self._held.values())

    def hold(self, seq: ScheduledSequence) -> bool:
        """A sequence has finished. Returns: whether its blocks are held. Its table is empty then."""
        if self._open.pop(seq.number, None) is None or seq.flushed:
            return False
        kept = self._ledger.blocks_for(len(seq.request.prompt_ids))
        self._held[seq.number] = _export(seq, tuple(seq.blocks[:kept]))._replace(held=True)
        rest = seq.blocks[kept:]
        seq.blocks.clear()
        self._ledger.release(rest)
        return True

    def end(self, number: int, why: HoldEnd) -> int:
        """Nobody fetches these blocks any more. Returns: how many were held; 0 if it is unknown."""
        self._open.pop(number, None)
        export = self._held.pop(number, None)
        if export is None:
            return 0
        self.ends[why] += 1
        self._ledger.release(list(export.blocks))
        return len(export.blocks)

    def release(self, key: bytes) -> int:
        """As end(), by key."""
        found = [seq.number for seq in self._open.values() if seq.request.hold == key]
        found += [export.number for export in self._held.values() if export.key == key]
        return sum(self.end(number, HoldEnd.RELEASED) for number in found)

    def give_up(self, why: HoldEnd = HoldEnd.GIVEN_UP) -> bool:
        """Frees the blocks held longest: a sequence needs them. Returns: False if there are none."""
        return bool(self._held) and self.end(next(iter(self._held)), why) > 0

    def clear(self) -> None:
        """No block computed so far may be used by others any more."""
        self._open.clear()
        while self.give_up(HoldEnd.FLUSHED):
            pass

    def fetch(self, seq: ScheduledSequence, first: int) -> int:
        """Decides to fill the blocks of a table from block `first` on. Returns: how many tokens; 0: none.

        A server whose blocks are not needed may free them.
        """
        source = seq.request.source
        if source is None or seq.fetched:
            return 0
        start = first * seq.block_size
        tokens = min(source.tokens, len(seq.request.prompt_ids), len(seq.tokens) - 1) - start
        if tokens <= 0 or source.weights != seq.weights or seq.scored < seq.score_end:
            self.abandon(seq)
            return 0
        self._tickets -= 1
        seq.loading = self._tickets
        blocks = tuple(seq.blocks[first : first + self._ledger.blocks_for(tokens)])
        self._fetches.append(KvFetch(seq.loading, source, start, blocks, tokens))
        return tokens

    def abandon(self, seq: ScheduledSequence) -> None:
        """Nothing is fetched for a sequence any more: the other server may free its blocks."""
        if seq.request.source is not None and not seq.fetched:
            seq.fetched = True
            self._fetches.append(KvFetch(0, seq.request.source, 0, (), 0))

    def arrived(self, ticket: int, tokens: int) -> None:
        """A fetch has ended with so many leading tokens of its blocks. KvTables.loaded() goes on."""
        self._arrived[ticket] = tokens

    def take_arrived(self, ticket: int) -> int:
        """Tokens of a fetch that has ended. Raises: InternalError if it has not."""
        if ticket not in self._arrived:
            raise InternalError(f"the fetch {ticket} has not ended")
        return self._arrived.pop(ticket)

    def drop(self, ticket: int) -> None:
        """Nobody awaits this fetch any more: its blocks may be written by others."""
        self._dropped.append(ticket)
        self._fetches = [fetch for fetch in self._fetches if fetch.ticket != ticket]

    def take(self) -> tuple[list[int], list[KvFetch]]:
        """(fetches to end before the next step, fetches to begin), since the last call."""
        taken = self._dropped, self._fetches
        self._dropped, self._fetches = [], []
        return taken


def _export(
    seq: ScheduledSequence, blocks: tuple[int, ...], unwritten: frozenset[int] = frozenset()
) -> KvExport:
    """unwritten: blocks that it may share, and that steps in flight compute."""
    prompt, written, planned = len(seq.request.prompt_ids), seq.computed, seq.planned
    if seq.loading:  # this counts as computed, and is not there yet
        written = planned = seq.sealed * seq.block_size
    if unwritten:
        missing = (index for index, block in enumerate(blocks) if block in unwritten)
        written = min(written, next(missing, len(blocks)) * seq.block_size)
    tokens, planned = min(written, prompt), min(planned, prompt)
    return KvExport(seq.number, seq.request.hold, tokens, blocks, held=False, planned=planned)
