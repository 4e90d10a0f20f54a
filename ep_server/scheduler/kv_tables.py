"""KV tables of a rank's sequences: allocates blocks, seals full ones, releases them.

Only this module changes what a sequence records about its blocks, except what a step computes. The
scheduler decides who gets blocks and when. Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ep_server.scheduler.handoffs import Handoffs
from ep_server.scheduler.host_tier import HostTier
from ep_server.scheduler.kv_blocks import BlockLedger
from ep_server.scheduler.kv_events import Prefix, packed
from ep_server.scheduler.lost_blocks import FIRST_TICKET
from ep_server.scheduler.sequence import NEVER, ScheduledSequence


class KvTables:
    """KV tables over one ledger.

    weights: version of those that compute blocks, part of a block's digest. host: None = one without slots.
    """

    def __init__(self, ledger: BlockLedger, weights: int = 0, host: HostTier | None = None) -> None:
        self.weights, self.host = weights, host or HostTier(0, ledger)
        self.handoffs, self.lost = Handoffs(ledger), ledger.lost
        self._ledger = ledger
        self._loading: dict[int, ScheduledSequence] = {}  # by ticket
        self._offered = frozenset[int]()  # before they are computed
        self.queries = self.hits = self.host_hits = 0  # prompt tokens: looked up, found, only on the host
        self._no_room_at = (-1, -1)  # (number, ledger.releases) of the sequence that last did not fit

    def place(self, seq: ScheduledSequence, spare: int) -> bool:
        """Allocates blocks for all tokens of a sequence without blocks; cached ones count as computed.

        Where a lost rank, the host tier or another server has what follows them, a load is decided, and the
        sequence is `loading`. Blocks held for other servers are given up where there is no room.

        Args:
            spare: blocks that must be left.
        Returns: False if there is no room; nothing has changed then.
        """
        if self._no_room_at == (seq.number, self._ledger.releases):
            return False
        length = len(seq.tokens)
        if seq.weights != self.weights:
            seq.renew(self.weights)
        digests = seq.digests((seq.skippable if self.lost else seq.reusable) // seq.block_size)
        shared = self._ledger.match(digests)
        fresh = self._ledger.blocks_for(length) - len(shared)
        while not self._ledger.fits(shared, fresh + spare) and self.handoffs.give_up():
            pass
        if not self._ledger.fits(shared, fresh + spare):
            self._no_room_at = (seq.number, self._ledger.releases)
            return False
        self._ledger.allocate(seq.blocks, shared, fresh)
        found = self._load(seq, digests, len(shared))
        seq.flushed = False
        seq.capacity = len(seq.blocks) * seq.block_size
        seq.sealed = seq.named = len(shared)
        seq.begin_at(seq.sealed * seq.block_size + found)
        self._await_full(seq)
        if seq.cached_tokens is None:
            copied = found if seq.loading >= FIRST_TICKET else 0  # from a lost rank, which is no cache
            seq.cached_tokens = seq.computed - copied
            if seq.caches and seq.scored >= seq.score_end:
                fetched = found if seq.loading < 0 else copied
                self.queries += length
                self.hits += seq.computed - fetched
                self.host_hits += found - fetched
        return True

    def maker_of(
        self, seq: ScheduledSequence, makers: Sequence[ScheduledSequence]
    ) -> ScheduledSequence | None:
        """The first of `makers` that computes a block which a sequence without blocks could share.

        It is the block that follows those found in the prefix cache.
        """
        if not makers or not seq.caches or seq.request.source is not None:
            return None
        count = seq.reusable // seq.block_size
        if seq.weights != self.weights:
            seq.renew(self.weights)
        digests = seq.digests(count)
        found = len(self._ledger.match(digests))
        following = digests[found : found + 1]
        if not following or self.host.slots.find(following) or self.lost.find(following):
            return None
        for maker in makers:
            full = len(maker.tokens) // maker.block_size
            if (
                maker.caches
                and not maker.flushed
                and found < full
                and maker.digests(full)[found] == following[0]
            ):
                return maker
        return None

    def extend(self, seq: ScheduledSequence) -> None:
        """One more block. Raises: InternalError if none is available."""
        self._ledger.append(seq.blocks)
        seq.capacity += seq.block_size
        self.host.hand_out(seq.blocks[-1:])

    def loaded(self, tickets: Sequence[int]) -> None:
        """These loads have ended. Sequences that still wait for one run from now on and offer its blocks."""
        for ticket in tickets:
            seq = self._loading.pop(ticket, None)
            if ticket < 0:
                self._fetched(seq, self.handoffs.take_arrived(ticket))
            elif ticket >= FIRST_TICKET:
                self._copied(seq, self.lost.take_arrived(ticket))
            else:
                self.host.ended(ticket)
            if seq is not None:
                seq.loading = 0
                self.filled(seq)

    def _fetched(self, seq: ScheduledSequence | None, tokens: int) -> None:
        """A fetch has ended with so many tokens; the sequence computes what did not arrive."""
        if seq is not None:
            seq.fetched = True
            seq.begin_at(seq.sealed * seq.block_size + tokens)
            seq.cached_tokens = min(seq.cached_tokens or 0, seq.computed)

    def _copied(self, seq: ScheduledSequence | None, blocks: int) -> None:
        """A copy from lost ranks has ended with so many blocks; the sequence computes the rest."""
        if seq is not None:
            seq.begin_at((seq.sealed + blocks) * seq.block_size)

    def filled(self, seq: ScheduledSequence) -> None:
        """The steps or copies that filled blocks of a sequence have ended: offers and names them."""
        if seq.flushed:
            return
        if seq.caches:
            self.seal(seq, seq.computed)
        if (names := self.lost.names) is not None:
            full = seq.computed // seq.block_size
            digests = seq.digests(full)
            for index in range(seq.named, full):
                names.set(seq.blocks[index], digests[index])
            seq.named = full
        self._await_full(seq)

    def _await_full(self, seq: ScheduledSequence) -> None:
        following = (seq.computed // seq.block_size + 1) * seq.block_size
        seq.next_full = following if seq.caches or self.lost.names is not None else NEVER

    def seal(self, seq: ScheduledSequence, tokens: int) -> None:
        """Offers the blocks that the first `tokens` tokens fill to other sequences.

        A step that was planned before theirs computes these tokens, if it has not done so already.
        """
        if seq.flushed:
            return
        full = tokens // seq.block_size
        digests = seq.digests(full)
        for index in range(seq.sealed, full):
            if self._ledger.seals(digests[index]):
                self._ledger.seal(seq.blocks[index], _prefix(seq, digests, index))
                if seq.caches:
                    self.host.sealed(seq.blocks[index], digests[index])
        seq.sealed = full
        if full * seq.block_size > seq.computed:
            self._offered |= seq.unwritten

    def take_offered(self) -> frozenset[int]:
        """Blocks that others may share since the last call, and that no step has computed yet."""
        offered, self._offered = self._offered, frozenset()
        return offered

    def forget(self, seq: ScheduledSequence) -> None:
        """Its request ended: nobody may reuse blocks that only its sequences could find."""
        if not seq.caches:
            self._ledger.forget(seq.digests(len(seq.request.prompt_ids) // seq.block_size))

    def forget_all(self, placed: Iterable[ScheduledSequence]) -> int:
        """Nobody may reuse a block computed so far. placed: all that hold some. Returns: blocks forgotten."""
        for seq in placed:
            seq.flushed, seq.next_full = True, NEVER
        self.host.clear()
        self.handoffs.clear()
        return self._ledger.forget_all()

    def release(self, seq: ScheduledSequence, *, finished: bool = False) -> None:
        """Releases all blocks: nothing of the sequence is computed any more. finished: they may be held."""
        if seq.caches:
            self.host.slots.touch(seq.digests(seq.sealed))
        if self._loading.pop(seq.loading, None) is not None:
            if seq.loading < 0:
                self.handoffs.drop(seq.loading)
            else:
                self.lost.drop(seq.loading)
        seq.loading = 0
        if not (finished and self.handoffs.hold(seq)):
            self._ledger.release(seq.blocks)
        seq.capacity = seq.computed = seq.planned = seq.sealed = seq.named = 0
        seq.next_full = NEVER

    def _load(self, seq: ScheduledSequence, digests: Sequence[bytes], first: int) -> int:
        """Fills new blocks of a table, from block `first` on. Returns: with how many tokens.

        From a lost rank or another server if it may, else from the host tier.
        """
        self.host.hand_out(seq.blocks[first:])
        if seq.continues or seq.request.source is None:
            sources = self.lost.find(digests[first:])
            if sources:
                self.handoffs.abandon(seq)
                seq.loading = self.lost.copy(seq.blocks[first : first + len(sources)], sources)
                self._loading[seq.loading] = seq
                return len(sources) * seq.block_size
        slots = self.host.slots.find(digests[first:]) if seq.caches else []
        if fetched := self.handoffs.fetch(seq, first):
            self._loading[seq.loading] = seq
            return fetched
        if slots:
            seq.loading = self.host.load(slots, seq.blocks[first : first + len(slots)])
            self._loading[seq.loading] = seq
        return len(slots) * seq.block_size


def _prefix(seq: ScheduledSequence, digests: Sequence[bytes], index: int) -> Prefix:
    """What the index keeps of a full block."""
    if not seq.caches:
        return Prefix(digests[index])
    parent = digests[index - 1] if index else None
    tokens = seq.tokens[index * seq.block_size : (index + 1) * seq.block_size]
    return Prefix(digests[index], parent, packed(tokens), seq.request.cache_salt)
