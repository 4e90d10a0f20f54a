"""Which prefix blocks of a rank are also in host memory, and which copies bring them there and back.

Every block that enters the prefix index is copied to the host as soon as it is computed, so evicting it from
the cache costs nothing. A prefix that only the host holds is loaded into new blocks before its sequence runs.
This module decides; a KvCopier carries out its KvMoves. Units: blocks; a slot holds one block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ep_server.errors import InternalError
from ep_server.records import KvLoad, KvMoves
from ep_server.scheduler.kv_blocks import BlockLedger


class HostSlots:
    """Slots by digest. The least recently used is given up first, unless a load still reads it."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._readers: dict[int, int] = {}  # loads in flight of a slot
        self._orphans: set[int] = set()  # slots without a digest that a load still reads

    @property
    def used(self) -> int:
        """Slots whose block can be found."""
        return len(self._slot_of)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The slots of the longest prefix that is here."""
        slots = []
        for digest in digests:
            slot = self._slot_of.get(digest)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def touch(self, digests: Sequence[bytes]) -> None:
        """These were used now, the first ones last: of a prefix the tail is given up first."""
        for digest in reversed(digests) if self._slot_of else ():
            if digest in self._slot_of:
                self._slot_of.move_to_end(digest)

    def take(self, digest: bytes) -> int | None:
        """A slot for a new digest; None if it has one, or if loads read all slots."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return None
        if not self._free:
            victim = next((d for d, slot in self._slot_of.items() if slot not in self._readers), None)
            if victim is None:
                return None
            self._free.append(self._slot_of.pop(victim))
        slot = self._slot_of[digest] = self._free.pop()
        return slot

    def read(self, slots: Iterable[int]) -> None:
        """A load begins: nothing is written to its slots until it has ended."""
        for slot in slots:
            self._readers[slot] = self._readers.get(slot, 0) + 1

    def end_read(self, slots: Iterable[int]) -> None:
        """A load of read() has ended."""
        for slot in slots:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                if slot in self._orphans:
                    self._orphans.remove(slot)
                    self._free.append(slot)

    def clear(self) -> None:
        """Nothing can be found any more."""
        for slot in self._slot_of.values():
            if slot in self._readers:
                self._orphans.add(slot)
            else:
                self._free.append(slot)
        self._slot_of.clear()

    def check_integrity(self) -> None:
        """Raises InternalError unless every slot is free, found or an orphan, once."""
        held = [*self._free, *self._slot_of.values(), *self._orphans]
        if sorted(held) != list(range(self.num_slots)):
            raise InternalError(f"host slots are held {len(held)} times, of {self.num_slots}")
        if self._orphans - self._readers.keys():
            raise InternalError("a host slot is kept for a load that has ended")


class HostTier:
    """The host slots of one rank, and the copies that were decided but not taken yet. 0 slots: never any."""

    def __init__(self, num_slots: int, ledger: BlockLedger) -> None:
        self.slots = HostSlots(num_slots)
        self._ledger = ledger
        self._sealed: list[tuple[int, bytes]] = []  # in the index, not copied yet
        self._saves: dict[int, int] = {}  # slot -> block
        self._loads: list[KvLoad] = []
        self._fresh: list[int] = []
        self._reading: dict[int, KvLoad] = {}  # by ticket
        self._tickets = 0

    def sealed(self, block: int, digest: bytes) -> None:
        """The ledger sealed a block; the step that computes it is planned."""
        if self.slots.num_slots:
            self._sealed.append((block, digest))

    def begin_plan(self) -> None:
        """Decides to copy what earlier steps compute. A later step may overwrite it, so this comes first."""
        for block, digest in self._sealed:
            if self._ledger.names(block, digest) and (slot := self.slots.take(digest)) is not None:
                self._saves[slot] = block  # of two for one slot, only the last is read
        self._sealed.clear()

    def hand_out(self, blocks: Iterable[int]) -> None:
        """The next step may write these blocks."""
        if self.slots.num_slots:
            self._fresh += blocks

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        """Decides to copy slots into new blocks. Returns: the ticket that ended() takes."""
        self._tickets += 1
        load = KvLoad(self._tickets, tuple(zip(blocks, slots, strict=True)))
        self.slots.read(slots)
        self._reading[load.ticket] = load
        self._loads.append(load)
        return load.ticket

    def ended(self, ticket: int) -> None:
        """A load has ended. Raises: InternalError if it is unknown."""
        if ticket not in self._reading:
            raise InternalError(f"no load {ticket} is in flight")
        self.slots.end_read(slot for _, slot in self._reading.pop(ticket).copies)

    def take_moves(self) -> KvMoves | None:
        """The copies decided since the last call; None if there is nothing to do."""
        if not (self._saves or self._loads or self._fresh):
            return None
        moves = KvMoves(tuple((b, s) for s, b in self._saves.items()), tuple(self._loads), tuple(self._fresh))
        self._saves.clear()
        self._loads.clear()
        self._fresh.clear()
        return moves

    def clear(self) -> None:
        """No block computed so far may be found any more. Loads in flight go on."""
        self._sealed.clear()
        self.slots.clear()
