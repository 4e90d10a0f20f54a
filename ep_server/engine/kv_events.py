"""[10] Changes of the ranks' prefix caches, for those who route requests by what is cached.

The ranks report only while somebody subscribes, and LINGER_SECONDS longer, for one who reconnects. A new
subscriber makes every rank send its whole content, which everybody gets: it replaces what came before. Used
in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from ep_server.errors import EpServerError, SlowReader
from ep_server.ranks.protocol import Ranks
from ep_server.records import KvCacheCleared, KvEventBatch

LAG_BATCHES: Final = 16384  # changes that may wait for one subscriber; snapshots do not count
HISTORY_BATCHES: Final = 1024  # of each rank, for one who reconnects
LINGER_SECONDS: Final = 30.0


class KvSubscription:
    """Batches for one reader, all ranks mixed, each rank's in order. close() it, or use `async with`."""

    def __init__(self, on_close: Callable[[KvSubscription], None]) -> None:
        self._on_close = on_close
        self._begun: set[int] = set()  # ranks whose snapshot or replay has begun
        self._waiting: deque[KvEventBatch] = deque()
        self._changes = 0  # waiting ones that belong to no snapshot
        self._error: EpServerError | None = None
        self._closed = False
        self._ready = asyncio.Event()

    async def __aenter__(self) -> KvSubscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[KvEventBatch]:
        """Yields batches until the subscription is closed. Raises: as read()."""
        while (batch := await self.read()) is not None:
            yield batch

    async def read(self) -> KvEventBatch | None:
        """The next batch; None once it is closed.

        Raises: SlowReader when more than LAG_BATCHES changes wait: subscribe again. RankLost, Draining.
        """
        while not self._closed:
            if self._error is not None:
                raise self._error
            if self._waiting:
                batch = self._waiting.popleft()
                self._changes -= batch.snapshot is None
                return batch
            self._ready.clear()
            await self._ready.wait()
        return None

    def close(self) -> None:
        """The reader leaves. Idempotent."""
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._ready.set()
            self._on_close(self)

    def resume(self, rank: int, missed: Iterable[KvEventBatch]) -> None:
        """The reader knows this rank's cache but for these batches; those after them follow."""
        self._begun.add(rank)
        for batch in missed:
            self._put(batch)

    def put(self, batch: KvEventBatch) -> None:
        """The newest batch of a rank. Dropped before the first snapshot of it begins."""
        if batch.snapshot is not None and batch.snapshot.index == 0:
            self._begun.add(batch.rank)
            self._drop(batch.rank)  # the snapshot replaces them
        if batch.rank in self._begun:
            self._put(batch)

    def end(self, error: EpServerError) -> None:
        """Nothing follows."""
        self._error = self._error or error
        self._waiting.clear()
        self._ready.set()

    def _put(self, batch: KvEventBatch) -> None:
        if self._error is not None:
            return
        self._waiting.append(batch)
        self._changes += batch.snapshot is None
        if self._changes > LAG_BATCHES:
            self.end(SlowReader(f"the reader is {LAG_BATCHES} batches of KV events behind: subscribe again"))
        self._ready.set()

    def _drop(self, rank: int) -> None:
        if any(batch.rank == rank for batch in self._waiting):
            self._waiting = deque(batch for batch in self._waiting if batch.rank != rank)
            self._changes = sum(batch.snapshot is None for batch in self._waiting)


@dataclass(slots=True)
class _History:
    """The last changes of a rank. last: number of its newest batch, 0: unknown. block_size: tokens."""

    changes: deque[KvEventBatch] = field(default_factory=lambda: deque(maxlen=HISTORY_BATCHES))
    last: int = 0
    block_size: int = 0

    def covers(self, start: int) -> bool:
        """Whether it holds every batch from number `start` on."""
        first = self.changes[0].sequence_number if self.changes else self.last + 1
        return self.last > 0 and first <= start <= self.last + 1

    def add(self, batch: KvEventBatch) -> None:
        """The newest batch."""
        self.last, self.block_size = batch.sequence_number, batch.block_size
        if batch.snapshot is None:
            self.changes.append(batch)
        else:
            self.changes.clear()


class KvEvents:
    """Every subscription, and the last changes of every rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.live: Collection[int] = range(ranks.num_ranks)  # ranks that report
        self._ranks = ranks
        self._subscriptions: set[KvSubscription] = set()
        self._history: dict[int, _History] = {}
        self._sent: Counter[int] = Counter()  # by rank: number of the newest batch
        self._before: Counter[int] = Counter()  # the same, of its processes before: each counts from 1
        self._watched = False
        self._stop_watching: asyncio.TimerHandle | None = None

    def subscribe(self, start: int = 0) -> KvSubscription:
        """Batches from number `start` of every rank on, if all are kept; otherwise a snapshot comes first."""
        subscription = KvSubscription(self._left)
        self._subscriptions.add(subscription)
        if self._stop_watching is not None:
            self._stop_watching.cancel()
            self._stop_watching = None
        if self._covers(start):
            for rank, history in self._history.items():
                missed = [batch for batch in history.changes if batch.sequence_number >= start]
                subscription.resume(rank, missed)
        else:
            self._watched = True
            self._ranks.watch_cache(on=True)
        return subscription

    def on_events(self, batch: KvEventBatch) -> None:
        """A batch from a rank. Dropped if it does not report: it has left."""
        if batch.rank in self.live:
            self._add(replace(batch, sequence_number=self._before[batch.rank] + batch.sequence_number))

    def left(self, rank: int) -> None:
        """A rank leaves, and its cache with it."""
        if (history := self._history.get(rank)) is not None:
            number = self._sent[rank] + 1
            self._add(KvEventBatch(rank, number, time.time(), history.block_size, (KvCacheCleared(),)))
        self._before[rank] = self._sent[rank]

    def end(self, error: EpServerError) -> None:
        """The ranks report no more: every subscription ends with `error`. Numbers go on with new ranks."""
        self._watched = False
        self._history.clear()
        self._before = self._sent.copy()
        for subscription in self._subscriptions:
            subscription.end(error)

    def _add(self, batch: KvEventBatch) -> None:
        self._sent[batch.rank] = batch.sequence_number
        self._history.setdefault(batch.rank, _History()).add(batch)
        for subscription in self._subscriptions:
            subscription.put(batch)

    def _covers(self, start: int) -> bool:
        """Of a rank that has left, it is enough that the reader knows all."""
        if start <= 0 or not self._watched or any(rank not in self._history for rank in self.live):
            return False
        return all(
            each.covers(start) or (rank not in self.live and each.last < start)
            for rank, each in self._history.items()
        )

    def _left(self, subscription: KvSubscription) -> None:
        self._subscriptions.discard(subscription)
        if not self._subscriptions and self._watched:
            loop = asyncio.get_running_loop()
            self._stop_watching = loop.call_later(LINGER_SECONDS, self._unwatch)

    def _unwatch(self) -> None:
        self._stop_watching = None
        if self._watched and not self._subscriptions:
            self._watched = False
            self._history.clear()
            self._ranks.watch_cache(on=False)
