"""What the engine offers beside generating: KV events of all ranks and orders to them, over fake ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ep_server.engine import kv_events
from ep_server.engine.active_request import Submission
from ep_server.engine.engine import Engine, EngineSettings, EngineState
from ep_server.engine.kv_events import KvSubscription
from ep_server.engine.observer import RankQueue
from ep_server.engine.profiles import ProfileLimits
from ep_server.errors import (
    DeadlineExceeded,
    Draining,
    RankLost,
    RequestCancelled,
    SlowReader,
    Unavailable,
    WrongState,
)
from ep_server.records import Request, Sampling, Stopping
from ep_server.testing.fake_ranks import LIMITS, FakeRanks
from tests.support.ranks.cache_mirror import CacheMirror

RANKS, WAIT = 2, 20.0
SMALL = replace(LIMITS, block_size=4, kv_blocks=12, max_context=40)


@dataclass
class Mirrors:
    """A subscriber that follows every rank."""

    subscription: KvSubscription
    ranks: list[CacheMirror] = field(default_factory=lambda: [CacheMirror() for _ in range(RANKS)])

    async def catch_up(self, fake: FakeRanks) -> None:
        """Reads until every mirror equals its rank's cache."""
        async with asyncio.timeout(WAIT):
            while [mirror.blocks for mirror in self.ranks[: fake.num_ranks]] != held(fake):
                batch = await self.subscription.read()
                assert batch is not None
                self.ranks[batch.rank].apply(batch)


def held(fake: FakeRanks) -> list[dict]:
    """What the caches hold, as CacheMirror.blocks."""
    found = []
    for scheduler in fake._schedulers:
        mirror = CacheMirror()
        for stored in scheduler.cache_contents():
            mirror._store(stored, scheduler.limits.block_size)
        found.append(mirror.blocks)
    return found


@asynccontextmanager
async def started(fake: FakeRanks, **settings: Any) -> AsyncIterator[Engine]:
    engine = Engine(fake, EngineSettings(max_context=SMALL.max_context, **settings))
    await engine.start(lambda *_: None)
    try:
        yield engine
    finally:
        await engine.stop()


async def generate(engine: Engine, rank: int, prompt: Sequence[int], length: int = 6, salt: str = "") -> int:
    """Runs a request to its end. Returns: prompt tokens that were cached."""
    request = Request(
        f"{rank}{prompt}{salt}", 0, tuple(prompt), Sampling(seed=1), Stopping(length), 0, salt, dp_rank=rank
    )
    ((_, stream),) = engine.submit([Submission(request)])
    while (chunk := await stream.read()).completion is None:
        pass
    stream.close()
    return chunk.completion.cached_tokens


async def test_subscribers_mirror_the_caches_of_all_ranks():
    fake = FakeRanks(RANKS, limits=SMALL)
    async with started(fake) as engine, engine.subscribe_kv_events() as first:
        mirrors = Mirrors(first)
        for start in range(12):  # more than the cache holds: blocks are evicted
            await generate(engine, start % RANKS, range(start, start + 10), salt="x" * (start % 3))
        await mirrors.catch_up(fake)
        assert all(mirror.complete and mirror.blocks for mirror in mirrors.ranks)
        async with engine.subscribe_kv_events() as late:
            others = Mirrors(late)
            await others.catch_up(fake)
            await generate(engine, 0, range(100, 120))
            await mirrors.catch_up(fake)
            await others.catch_up(fake)
        assert mirrors.ranks[0].holds(tuple(range(100, 120)))
        assert not mirrors.ranks[1].holds(tuple(range(100, 104)))


async def test_a_reader_that_returns_gets_what_it_missed():
    fake = FakeRanks(1, limits=SMALL)
    async with started(fake) as engine:
        async with engine.subscribe_kv_events() as subscription:
            mirrors = Mirrors(subscription)
            await generate(engine, 0, range(10))
            await mirrors.catch_up(fake)
        for start in range(4):
            await generate(engine, 0, range(start, start + 10))
        async with engine.subscribe_kv_events(mirrors.ranks[0].last + 1) as mirrors.subscription:
            mirrors.ranks[0].complete = False
            await mirrors.catch_up(fake)
            assert not mirrors.ranks[0].complete  # no snapshot was needed
        async with engine.subscribe_kv_events(mirrors.ranks[0].last + 2) as ahead:  # a number of nobody
            batch = await ahead.read()
            assert batch is not None and batch.snapshot is not None and batch.snapshot.index == 0


async def test_ranks_record_nothing_without_subscribers(monkeypatch):
    monkeypatch.setattr(kv_events, "LINGER_SECONDS", 0.0)
    fake = FakeRanks(RANKS, limits=SMALL)
    async with started(fake) as engine:
        logs = [scheduler._ledger for scheduler in fake._schedulers]
        assert all(ledger.log is None for ledger in logs)
        async with engine.subscribe_kv_events():
            assert all(ledger.log is not None for ledger in logs)
        async with asyncio.timeout(WAIT):
            while any(ledger.log is not None for ledger in logs):
                await asyncio.sleep(0)


async def test_a_subscriber_that_lags_ends_with_slow_reader(monkeypatch):
    monkeypatch.setattr(kv_events, "LAG_BATCHES", 3)
    fake = FakeRanks(RANKS, limits=SMALL)
    async with started(fake) as engine, engine.subscribe_kv_events() as lagging:
        for start in range(5):
            await generate(engine, 0, range(start, start + 10))
        with pytest.raises(SlowReader, match="3 batches of KV events behind"):
            await lagging.read()


async def test_a_request_in_prefill_is_not_queued():
    fake = FakeRanks(RANKS, limits=replace(SMALL, max_step_tokens=4, max_running=1))
    async with started(fake) as engine:
        fake.hold()
        tasks = [asyncio.create_task(generate(engine, 1, range(start, start + 12))) for start in (0, 50)]
        await asyncio.sleep(0)
        assert engine.queues() == [RankQueue(0, 0), RankQueue(0, 2)]
        fake.step()  # a third of the first prompt
        assert engine.queues() == [RankQueue(0, 0), RankQueue(1, 1)]
        assert engine.statistics().waiting == 2  # neither has a token
        fake.release()
        await asyncio.gather(*tasks)
        assert engine.queues() == [RankQueue(0, 0)] * 2


async def test_flush_forgets_prefixes_of_idle_and_busy_ranks():
    fake = FakeRanks(RANKS, limits=SMALL)
    prompt = range(20)
    async with started(fake) as engine, engine.subscribe_kv_events() as events:
        mirrors = Mirrors(events)
        await generate(engine, 0, prompt)
        assert await generate(engine, 0, prompt) == 16
        await generate(engine, 1, prompt)
        fake.hold()
        running = asyncio.create_task(generate(engine, 1, prompt, length=12))
        await asyncio.sleep(0)
        fake.step()
        flushed = asyncio.create_task(engine.flush_cache(WAIT))
        await asyncio.sleep(0)
        fake.release()
        assert await flushed > 0
        await running
        assert held(fake) == [{}, {}]  # the running one offers no block of before the flush, nor one after
        await mirrors.catch_up(fake)
        assert await generate(engine, 0, prompt) == await generate(engine, 1, prompt) == 0
        assert await generate(engine, 1, prompt) == 16


async def test_a_flush_ends_with_its_deadline_or_the_ranks():
    fake = FakeRanks(RANKS, limits=SMALL)
    with pytest.raises(Unavailable, match="starting"):
        await Engine(fake, EngineSettings(max_context=8)).flush_cache(WAIT)
    async with started(fake) as engine:
        fake.hold()
        with pytest.raises(DeadlineExceeded, match=r"ranks \[0, 1\] did not answer within 0.01 s"):
            await engine.flush_cache(0.01)
        waiting = [asyncio.create_task(engine.flush_cache(WAIT)), asyncio.create_task(reading(engine))]
        await asyncio.sleep(0)
        fake.kill(1)
        for task in waiting:
            with pytest.raises(RankLost, match="rank 1 was lost"):
                await task


async def test_subscriptions_end_when_the_server_drains():
    async with started(FakeRanks(RANKS, limits=SMALL)) as engine:
        task = asyncio.create_task(reading(engine))
        await asyncio.sleep(0)
        await engine.drain(0)
        with pytest.raises(Draining):
            await task


async def test_new_ranks_never_repeat_numbers_of_kv_events():
    fake = FakeRanks(1, limits=SMALL)
    async with started(fake, recover=True) as engine:
        async with engine.subscribe_kv_events() as subscription:
            mirrors = Mirrors(subscription)
            await generate(engine, 0, range(10))
            await mirrors.catch_up(fake)
        last = mirrors.ranks[0].last
        await lose(engine, fake)
        async with engine.subscribe_kv_events() as other:  # makes the new rank report
            fresh = Mirrors(other)
            for start in range(4):
                await generate(engine, 0, range(start, start + 10))
            await fresh.catch_up(fake)
            async with engine.subscribe_kv_events(last + 1) as back:  # what it missed includes a new cache
                batch = await back.read()
                assert batch is not None and batch.snapshot is not None and batch.snapshot.index == 0
        assert fresh.ranks[0].last > last


async def test_a_profile_ends_with_its_ranks(tmp_path: Path):
    fake = FakeRanks(RANKS, limits=SMALL)
    async with started(fake, recover=True, profiles=ProfileLimits(str(tmp_path))) as engine:
        await engine.start_profile(1)
        await lose(engine, fake)
        await engine.start_profile(1)
        fake.hold()
        starting = asyncio.create_task(engine.start_profile(1))
        with pytest.raises(WrongState):
            await starting
        stopping = asyncio.create_task(engine.stop_profile())
        await asyncio.sleep(0)
        await lose(engine, fake)
        with pytest.raises(RankLost):
            await stopping
        fake.hold()
        starting = asyncio.create_task(engine.start_profile(1))
        await asyncio.sleep(0)
        fake.start_gate = asyncio.Event()
        fake.kill(0)
        with pytest.raises(RankLost):  # at once: nobody is left to stop it
            await starting
        fake.start_gate.set()
        await serving(engine)
        await engine.start_profile(1)


async def test_requests_that_lost_their_ranks_are_not_running():
    fake = FakeRanks(1, limits=SMALL)
    async with started(fake, recover=True) as engine:
        fake.hold()
        task = asyncio.create_task(generate(engine, 0, range(10)))
        await asyncio.sleep(0)
        fake.step()
        assert engine.queues() == [RankQueue(1, 0)]
        fake.start_gate = asyncio.Event()
        fake.kill(0)
        assert engine.queues() == [RankQueue(0, 1)]
        assert engine.abort(f"0{range(10)}") is True
        with pytest.raises(RequestCancelled):
            await task
        fake.start_gate.set()
        await serving(engine)
        engine.check_integrity()


async def lose(engine: Engine, fake: FakeRanks) -> None:
    """A rank is lost; returns once the new ones serve."""
    fake.kill(0)
    await serving(engine)


async def serving(engine: Engine) -> None:
    async with asyncio.timeout(WAIT):
        while engine.state is not EngineState.SERVING:
            await asyncio.sleep(0)


async def reading(engine: Engine) -> None:
    async with engine.subscribe_kv_events() as subscription:
        async for _ in subscription:
            pass
