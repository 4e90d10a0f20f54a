"""KV blocks of a rank that others find if it is lost, and those of lost ranks that it takes over. Pure.

Each full block has a name, its digest, in memory that outlives the rank. A name is cleared before a step may
write to its block again, and set once the step that filled the block has ended. A sequence that continues
after a loss copies the blocks whose names it knows, and computes the rest. Units: blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ep_server.errors import InternalError

FIRST_TICKET = 1 << 32  # loads from the host tier count from 1


class BlockNames(Protocol):
    """The names of a rank's own blocks, in memory that outlives it."""

    def set(self, block: int, name: bytes) -> None:
        """The content of a block is complete."""
        ...

    def clear(self, block: int) -> None:
        """The next step may write to a block."""
        ...

    def clear_all(self) -> None:
        """Nobody may use what was computed so far."""
        ...


class LostBlock(NamedTuple):
    """A block in the memory of a lost rank."""

    place: int
    block: int
    name: bytes


class LostCopy(NamedTuple):
    """Blocks of a sequence to fill from memory of lost ranks, in order; it runs afterwards."""

    ticket: int
    blocks: tuple[int, ...]
    sources: tuple[LostBlock, ...]


class LostBlocks:
    """Of one rank. names: of its own blocks; None if nobody could find them."""

    def __init__(self) -> None:
        self.names: BlockNames | None = None
        self.copied = 0  # blocks so far
        self._found: dict[bytes, LostBlock] = {}
        self._copies: dict[int, LostCopy] = {}  # by ticket, oldest first
        self._arrived: dict[int, int] = {}  # by ticket: leading blocks
        self._tickets = FIRST_TICKET

    def __bool__(self) -> bool:
        """A sequence may find blocks."""
        return bool(self._found)

    def forget_all(self) -> None:
        """Later requests use nothing that this rank or a lost one has computed so far."""
        self.offer({})
        if self.names is not None:
            self.names.clear_all()

    def offer(self, found: Mapping[bytes, LostBlock]) -> None:
        """What lost ranks have left, by name; in place of what was offered before."""
        self._found = dict(found)

    def find(self, names: Iterable[bytes]) -> list[LostBlock]:
        """The longest prefix that lost ranks have left."""
        found = []
        for name in names:
            block = self._found.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def copy(self, blocks: Sequence[int], sources: Sequence[LostBlock]) -> int:
        """Decides to fill new blocks. Returns: the ticket that arrived() takes."""
        self._tickets += 1
        self._copies[self._tickets] = LostCopy(self._tickets, tuple(blocks), tuple(sources))
        return self._tickets

    def drop(self, ticket: int) -> None:
        """Its sequence has given the blocks back."""
        self._copies.pop(ticket, None)
        self._arrived.pop(ticket, None)

    @property
    def next(self) -> LostCopy | None:
        """The oldest that has not arrived."""
        return next(iter(self._copies.values()), None)

    def arrived(self, ticket: int, blocks: int) -> None:
        """So many leading blocks of a copy are filled; not all if the memory was freed meanwhile."""
        del self._copies[ticket]
        self._arrived[ticket] = blocks
        self.copied += blocks

    def take_arrived(self, ticket: int) -> int:
        """Blocks of a copy that has ended. Raises: InternalError if it has not."""
        if ticket not in self._arrived:
            raise InternalError(f"the copy {ticket} has not ended")
        return self._arrived.pop(ticket)
