"""[4] Reports the prefix cache of a rank to whoever watches it.

A batch of changes is sent after each step that made some. Its whole content, sent when a watch begins, comes
in several batches, which are numbered like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ep_server.records import (
    KvBlocksStored,
    KvCacheCleared,
    KvEvent,
    KvEventBatch,
    KvSnapshot,
)
from ep_server.scheduler.rank_scheduler import RankScheduler

SNAPSHOT_BLOCKS, SNAPSHOT_TOKENS = 1024, 65536  # in one batch, at most


class CacheReporter:
    """Sends what a rank's prefix cache gains and loses. Used in the thread of the rank's loop."""

    def __init__(
        self,
        rank: int,
        scheduler: RankScheduler,
        send: Callable[[KvEventBatch], None],
        now: Callable[[], float],
    ) -> None:
        """now: Unix time."""
        self.watched = False
        self._rank = rank
        self._scheduler = scheduler
        self._send = send
        self._now = now
        self._sent = 0

    def watch(self, *, on: bool) -> None:
        """Begins or ends to report. Every beginning sends the whole content first."""
        self.publish()
        self.watched = on
        self._scheduler.watch_cache(on=on)
        if on:
            self._send_snapshot()

    def restart(self) -> None:
        """Reports nothing. Whoever watches next counts from 1."""
        self.watch(on=False)
        self._sent = 0

    def publish(self) -> None:
        """Sends the changes since the last call, if there are any."""
        if self.watched and (events := self._scheduler.cache_events()):
            self._send_batch(events)

    def _send_snapshot(self) -> None:
        blocks, block_size = self._scheduler.cache_contents(), self._scheduler.limits.block_size
        parts: list[list[KvEvent]] = [[]]
        room = size = max(1, min(SNAPSHOT_BLOCKS, SNAPSHOT_TOKENS // block_size))
        for piece in _pieces(blocks, size, block_size):
            if len(piece.block_hashes) > room:
                parts.append([])
                room = size
            parts[-1].append(piece)
            room -= len(piece.block_hashes)
        parts[0].insert(0, KvCacheCleared())
        total = sum(len(stored.block_hashes) for stored in blocks)
        for index, events in enumerate(parts):
            self._send_batch(events, KvSnapshot(index, len(parts), total))

    def _send_batch(self, events: list[KvEvent], snapshot: KvSnapshot | None = None) -> None:
        self._sent += 1
        block_size = self._scheduler.limits.block_size
        self._send(KvEventBatch(self._rank, self._sent, self._now(), block_size, tuple(events), snapshot))


def _pieces(blocks: list[KvBlocksStored], size: int, block_size: int) -> Iterator[KvBlocksStored]:
    """The same in events of at most `size` blocks."""
    for stored in blocks:
        for start in range(0, len(stored.block_hashes), size):
            yield KvBlocksStored(
                stored.block_hashes[start : start + size],
                stored.block_hashes[start - 1] if start else stored.parent_hash,
                stored.token_ids[start * block_size : (start + size) * block_size],
                stored.cache_salt,
            )
