"""KV tables of a rank's sequences: allocates blocks, seals full ones, releases them.

Only this module changes what a sequence records about its blocks, except what a step computes. The
scheduler decides who gets blocks and when. Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ep_server.scheduler.kv_blocks import BlockLedger
from ep_server.scheduler.kv_events import Prefix, packed
from ep_server.scheduler.sequence import NEVER, ScheduledSequence


class KvTables:
    """KV tables over one ledger. weights: version of those that compute blocks, part of a block's digest."""

    def __init__(self, ledger: BlockLedger, weights: int = 0) -> None:
        self.weights = weights
        self._ledger = ledger
        self._no_room_at = (-1, -1)  # (number, ledger.releases) of the sequence that last did not fit

    def place(self, seq: ScheduledSequence, spare: int) -> bool:
        """Allocates blocks for all tokens of a sequence without blocks; cached ones count as computed.

        Args:
            spare: blocks that must be left.
        Returns: False if there is no room; nothing has changed then.
        """
        if self._no_room_at == (seq.number, self._ledger.releases):
            return False
        length = len(seq.tokens)
        if seq.weights != self.weights:
            seq.renew(self.weights)
        shared = self._ledger.match(seq.digests(seq.reusable // seq.block_size))
        fresh = self._ledger.blocks_for(length) - len(shared)
        if not self._ledger.fits(shared, fresh + spare):
            self._no_room_at = (seq.number, self._ledger.releases)
            return False
        self._ledger.allocate(seq.blocks, shared, fresh)
        seq.flushed = False
        seq.capacity = len(seq.blocks) * seq.block_size
        seq.sealed = len(shared)
        seq.computed = seq.planned = seq.sealed * seq.block_size
        seq.next_seal = seq.computed + seq.block_size if seq.caches else NEVER
        return True

    def extend(self, seq: ScheduledSequence) -> None:
        """One more block. Raises: InternalError if none is available."""
        self._ledger.append(seq.blocks)
        seq.capacity += seq.block_size

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
        seq.sealed = full
        seq.next_seal = (full + 1) * seq.block_size if seq.caches else NEVER

    def forget(self, seq: ScheduledSequence) -> None:
        """Its request ended: nobody may reuse blocks that only its sequences could find."""
        if not seq.caches:
            self._ledger.forget(seq.digests(len(seq.request.prompt_ids) // seq.block_size))

    def forget_all(self, placed: Iterable[ScheduledSequence]) -> int:
        """Nobody may reuse a block computed so far. placed: all that hold some. Returns: blocks forgotten."""
        for seq in placed:
            seq.flushed, seq.next_seal = True, NEVER
        return self._ledger.forget_all()

    def release(self, seq: ScheduledSequence) -> None:
        """Releases all blocks: nothing of the sequence is computed any more."""
        self._ledger.release(seq.blocks)
        seq.capacity = seq.computed = seq.planned = seq.sealed = 0
        seq.next_seal = NEVER


def _prefix(seq: ScheduledSequence, digests: Sequence[bytes], index: int) -> Prefix:
    """What the index keeps of a full block."""
    if not seq.caches:
        return Prefix(digests[index])
    parent = digests[index - 1] if index else None
    tokens = seq.tokens[index * seq.block_size : (index + 1) * seq.block_size]
    return Prefix(digests[index], parent, packed(tokens), seq.request.cache_salt)
