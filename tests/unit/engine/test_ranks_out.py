"""What the front keeps of a rank that has left, that has not joined, or that returns."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from ep_server.engine.admission import Admission, AdmissionLimits
from ep_server.engine.delivery import Delivery
from ep_server.engine.kv_events import KvEvents, KvSubscription
from ep_server.engine.request_table import RequestTable
from ep_server.observability.metrics import ServerMetrics
from ep_server.ranks.protocol import GroupState, LossCause
from ep_server.records import (
    KvBlocksStored,
    KvCacheCleared,
    KvEventBatch,
    KvSnapshot,
    RankLoad,
    RankStatistics,
)
from tests.support.observability.reports import series

RANKS: Any = SimpleNamespace(
    num_ranks=3, watch_cache=lambda on: None, forget_lost=lambda: None, submit=None, cancel=None
)
CONTENT = KvSnapshot(0, 1, 0)


def batch(rank: int, number: int, snapshot: KvSnapshot | None = None) -> KvEventBatch:
    event = KvCacheCleared() if snapshot else KvBlocksStored((number,), None, (1,) * 4)
    return KvEventBatch(rank, number, 0.0, 4, (event,), snapshot)


async def read(subscription: KvSubscription, count: int) -> list[tuple[int, int, bool]]:
    """So many batches: rank, number, and whether the cache is empty then."""
    found = []
    for _ in range(count):
        got = await subscription.read()
        assert got is not None
        found.append((got.rank, got.sequence_number, isinstance(got.events[0], KvCacheCleared)))
    assert not subscription._waiting
    return found


async def test_numbers_of_a_rank_that_returns_go_on() -> None:
    """Its cache is gone with it, and what it sends after it has left does not count."""
    events = KvEvents(RANKS)
    events.live = (0, 1)
    async with events.subscribe() as all_of_it:
        for one in (batch(0, 1, CONTENT), batch(1, 1, CONTENT), batch(1, 2), batch(1, 3)):
            events.on_events(one)
        events.left(1)
        events.live = (0,)
        events.on_events(batch(1, 4))
        assert await read(all_of_it, 5) == [
            (0, 1, True),
            (1, 1, True),
            (1, 2, False),
            (1, 3, False),
            (1, 4, True),
        ]
        async with events.subscribe(2) as back:  # it misses the end of rank 1
            assert await read(back, 3) == [(1, 2, False), (1, 3, False), (1, 4, True)]
        events.on_events(batch(0, 2))
        events.on_events(batch(0, 3))
        events.on_events(batch(0, 4))
        events.on_events(batch(0, 5))
        async with events.subscribe(5) as knows:  # rank 1 has nothing that it lacks
            assert await read(knows, 1) == [(0, 5, False)]
        events.live = (0, 1)
        events.on_events(batch(1, 1, CONTENT))
        events.on_events(batch(1, 2))
        assert [number for rank, number, _ in await read(all_of_it, 6) if rank == 1] == [5, 6]
        async with events.subscribe(5) as behind:  # another process has begun: everything comes anew
            assert not behind._waiting


def state(*live: int) -> GroupState:
    return GroupState(1, live, 0, None, (), {})


def up(registry: CollectorRegistry) -> set[str]:
    """Ranks with a series of epserver_ep_rank_up, whatever its value."""
    found = series(generate_latest(registry).decode())
    return {dict(labels)["rank"] for name, labels in found if name == "epserver_ep_rank_up"}


def test_a_rank_that_never_joined_is_not_reported_down() -> None:
    """The loss counts all the same. A report that comes late is not kept."""
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry, model="m", version="1", max_queue=9)
    pace = Admission(AdmissionLimits(3, 8, 8, 8), lambda: 0.0).pace
    delivery = Delivery(RANKS, RequestTable(3), metrics, time.monotonic, pace)
    delivery.on_group(state(0, 1))
    delivery.on_rank_lost(2, LossCause.EXIT)
    assert "2" not in up(registry)
    delivery.on_statistics(RankStatistics(2, RankLoad(running=1)))
    assert not delivery.rank_statistics
    delivery.on_rank_lost(1, LossCause.EXIT)
    assert "1" in up(registry), "it served"
