"""What happened to the prefix index of a rank: blocks stored and removed, in order, for whoever routes by it.

Kept only while somebody watches. Hashes are the first 64 bits of a block's digest, signed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from ep_server.records import KvBlocksRemoved, KvBlocksStored, KvCacheCleared, KvEvent

TOKEN_TYPE = "i"


class Prefix(NamedTuple):
    """A sealed block: its digest, that of the block before it (None: it is the first), and its token ids.

    token_ids: packed as TOKEN_TYPE, an eighth of the memory of a tuple. Empty: only sequences of one request
      find the block, so no event reports it.
    """

    digest: bytes
    parent: bytes | None = None
    token_ids: bytes = b""
    cache_salt: str = ""


def packed(token_ids: Iterable[int]) -> bytes:
    """Token ids as a Prefix holds them."""
    return array(TOKEN_TYPE, token_ids).tobytes()


def block_hash(digest: bytes) -> int:
    """The integer that names a block outside this process."""
    return int.from_bytes(digest[:8], "big", signed=True)


class KvEventLog:
    """Changes since the last take(); neighbours of one kind become one event."""

    def __init__(self) -> None:
        self._events: list[_Stored | list[int] | None] = []  # None: cleared

    def stored(self, prefix: Prefix) -> None:
        """A block can be found by others now."""
        if not prefix.token_ids:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, _Stored) and last.continues(prefix):
            last.add(prefix)
        else:
            self._events.append(_Stored(prefix))

    def removed(self, prefix: Prefix) -> None:
        """A block cannot be found any more."""
        if not prefix.token_ids:
            return
        last = self._events[-1] if self._events else None
        if not isinstance(last, list):
            last = []
            self._events.append(last)
        last.append(block_hash(prefix.digest))

    def cleared(self) -> None:
        """No block can be found any more: what happened before does not matter."""
        self._events = [None]

    def take(self) -> list[KvEvent]:
        """The changes so far, oldest first; forgets them."""
        events, self._events = self._events, []
        return [_event(event) for event in events]


def contents(prefixes: Iterable[Prefix]) -> list[KvBlocksStored]:
    """Sealed blocks as events, parents before children, chains together."""
    index = {prefix.digest: prefix for prefix in prefixes if prefix.token_ids}
    children: dict[bytes | None, list[Prefix]] = {}
    for prefix in index.values():
        children.setdefault(prefix.parent if prefix.parent in index else None, []).append(prefix)
    found: list[_Stored] = []
    left = children.get(None, [])[::-1]
    while left:
        prefix = left.pop()
        if found and found[-1].continues(prefix):
            found[-1].add(prefix)
        else:
            found.append(_Stored(prefix))
        left += children.get(prefix.digest, [])
    return [stored.event() for stored in found]


class _Stored:
    """A chain of blocks that were stored one after the other."""

    def __init__(self, first: Prefix) -> None:
        self._first, self._last = first, first
        self._hashes = [block_hash(first.digest)]
        self._token_ids = array(TOKEN_TYPE, first.token_ids)

    def continues(self, prefix: Prefix) -> bool:
        return prefix.parent == self._last.digest

    def add(self, prefix: Prefix) -> None:
        self._last = prefix
        self._hashes.append(block_hash(prefix.digest))
        self._token_ids.frombytes(prefix.token_ids)

    def event(self) -> KvBlocksStored:
        parent = self._first.parent
        return KvBlocksStored(
            tuple(self._hashes),
            None if parent is None else block_hash(parent),
            tuple(self._token_ids),
            self._first.cache_salt,
        )


def _event(event: _Stored | list[int] | None) -> KvEvent:
    if event is None:
        return KvCacheCleared()
    return event.event() if isinstance(event, _Stored) else KvBlocksRemoved(tuple(event))
