"""Ledger of the KV blocks of one rank: reference counts and the index of reusable prefixes.

A block is free, cached (it holds a sealed prefix that no sequence references; least recently used is
evicted first), or used (one or more tables reference it). Units: blocks; `block_size` is in tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from ep_server.errors import InternalError
from ep_server.records import KvBlocksStored
from ep_server.scheduler.kv_events import KvEventLog, Prefix, contents
from ep_server.scheduler.lost_blocks import LostBlocks

DIGEST_BYTES = 16  # 128 bits: neither accidental nor searched-for collisions


def root_digest(cache_salt: str, weights: int = 0) -> bytes:
    """The parent of a sequence's first block: prefixes are shared within one salt and version of weights."""
    salt, version = cache_salt.encode("utf-8", "surrogatepass"), weights.to_bytes(8, "little")
    return blake2b(salt, digest_size=DIGEST_BYTES, salt=version).digest()


def private_root(request_id: str, weights: int = 0) -> bytes:
    """As root_digest(), for sequences of one request that share with nobody else."""
    name, version = request_id.encode("utf-8", "surrogatepass"), weights.to_bytes(8, "little")
    return blake2b(name, digest_size=DIGEST_BYTES, salt=version, person=b"request").digest()


def block_digests(parent: bytes, token_ids: Sequence[int], size: int) -> list[bytes]:
    """Names full blocks of `size` tokens by their tokens and, through `parent`, by everything before them."""
    packed = array("q", token_ids)
    words, step, digests = packed.tobytes(), size * packed.itemsize, list[bytes]()
    for first in range(0, len(words), step):
        parent = blake2b(parent + words[first : first + step], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


class BlockLedger:
    """Reference counts and prefix index over `num_blocks` blocks.

    Tables are plain lists of block ids that the caller owns and this class changes in place.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.releases = 0  # counts releases; a caller that found no room can wait for it to change
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._prefix_of: list[Prefix | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.log: KvEventLog | None = None  # None: nobody watches the index
        self.lost = LostBlocks()

    def __repr__(self) -> str:
        return f"BlockLedger(used={self.used}, cached={self.cached}, total={self.num_blocks})"

    @property
    def available(self) -> int:
        """Blocks that append() can hand out, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks referenced by at least one table."""
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """Unreferenced blocks kept for their prefix."""
        return len(self._cached)

    def only_in(self, tables: Iterable[Sequence[int]]) -> int:
        """Blocks that no other table references."""
        counted = Counter(block for table in tables for block in table)
        return sum(self._references[block] == count for block, count in counted.items())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest sealed prefix; they stay evictable until allocate() takes them."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def fits(self, shared: Sequence[int], fresh: int) -> bool:
        """Whether allocate(table, shared, fresh) would succeed now."""
        revived = sum(not self._references[block] for block in shared)
        return fresh + revived <= self.available

    def allocate(self, table: list[int], shared: Sequence[int], fresh: int) -> None:
        """Fills an empty table: takes a reference to each block of `shared`, then `fresh` new blocks.

        Raises: InternalError if it does not fit; nothing has changed then.
        """
        if table or not self.fits(shared, fresh):
            raise InternalError(f"no room for {len(shared)} shared + {fresh} fresh blocks in {self!r}")
        for block in shared:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
            table.append(block)
        for _ in range(fresh):
            self.append(table)

    def append(self, table: list[int]) -> None:
        """Adds one unshared block, evicting the least recently used cached one if none is free.

        Raises: InternalError if none is available.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            prefix = self._prefix_of[block]
            assert prefix is not None
            del self._block_of[prefix.digest]
            self._removed(block)
        else:
            raise InternalError(f"no block available in {self!r}")
        self._references[block] = 1
        if self.lost.names is not None:
            self.lost.names.clear(block)
        table.append(block)

    def seals(self, digest: bytes) -> bool:
        """Whether seal() would keep a block of this digest: an equal block sealed earlier wins."""
        return digest not in self._block_of

    def names(self, block: int, digest: bytes) -> bool:
        """Whether the index names this block by this digest."""
        return self._block_of.get(digest) == block

    def seal(self, block: int, prefix: Prefix) -> None:
        """Makes a full, computed block findable by its digest, if seals() it."""
        if self.seals(prefix.digest):
            self._block_of[prefix.digest] = block
            self._prefix_of[block] = prefix
            if self.log is not None:
                self.log.stored(prefix)

    def sealed(self) -> list[KvBlocksStored]:
        """Every block that any later sequence can find, parents before children."""
        return contents(prefix for prefix in self._prefix_of if prefix is not None)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Nobody finds these blocks any more; unknown digests are ignored."""
        for digest in digests:
            block = self._block_of.pop(digest, None)
            if block is not None:
                self._removed(block)
                if block in self._cached:
                    del self._cached[block]
                    self._free.append(block)

    def forget_all(self) -> int:
        """No block can be found any more, and those that nobody references are free.

        Returns: how many could be found.
        """
        forgotten = len(self._block_of)
        self._free += reversed(self._cached)
        self._cached.clear()
        for block in self._block_of.values():
            self._prefix_of[block] = None
        self._block_of.clear()
        if self.log is not None:
            self.log.cleared()
        return forgotten

    def release(self, table: list[int]) -> None:
        """Drops the table's references and empties it. Sealed blocks stay cached, tails go first."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._prefix_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        table.clear()
        self.releases += 1

    def _removed(self, block: int) -> None:
        """The index does not name a block any more."""
        if self.log is not None and (prefix := self._prefix_of[block]) is not None:
            self.log.removed(prefix)
        self._prefix_of[block] = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Recounts everything from `tables`, which are all tables in use.

        Raises: InternalError naming the first disagreement.
        """
        counted = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise InternalError(f"a table holds a block twice: {table}")
            for block in table:
                counted[block] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise InternalError("a block is on the free list twice")
        for block in range(self.num_blocks):
            places = (counted[block] > 0, block in free, block in self._cached)
            if sum(places) != 1:
                raise InternalError(f"block {block} is (used, free, cached) = {places}")
            if counted[block] != self._references[block]:
                raise InternalError(
                    f"block {block}: {self._references[block]} references kept, {counted[block]} in tables"
                )
            prefix = self._prefix_of[block]
            if prefix is not None and (block in free or self._block_of.get(prefix.digest) != block):
                raise InternalError(f"block {block} carries a digest the index does not know")
            if prefix is None and block in self._cached:
                raise InternalError(f"cached block {block} has no digest")
        if len(self._block_of) != sum(prefix is not None for prefix in self._prefix_of):
            raise InternalError("the prefix index names a block without a digest")
