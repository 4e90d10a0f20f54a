"""Processes on standby become ranks of a group that was planned after they started."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.cluster.node_group import GroupOrder, NodeGroup
from ep_server.config import Config
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.local_ranks import WORKER, LocalRanks, SharedMemory, standby_pool
from ep_server.ranks.process import NO_CALLBACKS
from ep_server.ranks.standby import StandbyPool
from tests.support.ranks.rank_group import Recorder, greedy

WAIT = 120.0
CONFIG = Config.from_values(
    {
        "model.path": str(DEMO_MODEL),
        "cluster.nodes": 2,
        "cluster.node_rank": 0,
        "parallel.ranks": 2,
        "parallel.threads_per_rank": 1,
        "resilience.standby": 2,
        "scheduler.kv_blocks": 64,
    }
)


@pytest.fixture
async def pool() -> AsyncIterator[StandbyPool]:
    made = standby_pool(CONFIG)
    made.fill()
    await full(made)
    yield made
    await made.close()


async def full(pool: StandbyPool) -> list[int]:
    """Process ids, once there are as many as there shall be, which have imported all."""
    async with asyncio.timeout(WAIT):
        while len(pool._waiting) < 2 or not all(one.imported.is_set() for one in pool._waiting):
            await asyncio.sleep(0.01)
    return [one.process.pid for one in pool._waiting]


@pytest.mark.parametrize("imported", [True, False])
async def test_a_group_starts_with_processes_on_standby(pool: StandbyPool, imported: bool) -> None:
    """All that have imported what they need, but for one that has ended."""
    first, second = [one.process for one in pool._waiting]
    if not imported:
        pool._waiting[1].imported.clear()
    first.signal(signal.SIGKILL)
    async with asyncio.timeout(WAIT):
        await first.exited.wait()
        group = NodeGroup(CONFIG, GroupOrder(1, (0,)), {}, standby=pool)
        ranks, heard = RankProcesses(group.config, group), Recorder()
        try:
            ready = await ranks.start(heard, lambda *_: None)
            pids = {rank.pid for rank in ready}
            assert (second.pid in pids) == imported and first.pid not in pids | set(ranks.pids)
            ranks.submit(1, greedy(1, (5, 6, 7), 4))
            await heard.until(lambda: len(heard.tokens.get(1, ())) == 4)
        finally:
            await ranks.stop()


async def test_one_that_ends_is_replaced(pool: StandbyPool) -> None:
    """Without a loss of a rank, and again."""
    for _ in range(2):
        first, second = [one.process for one in pool._waiting]
        first.signal(signal.SIGKILL)
        async with asyncio.timeout(WAIT):
            await first.ended.wait()
        assert [one.process for one in pool._waiting] == [second]
        kept, made = await full(pool)
        assert kept == second.pid and made not in (first.pid, second.pid)


async def test_one_that_hangs_is_replaced() -> None:
    """A signal stops it, and it gets no Start message once its channel is closed."""
    pool = StandbyPool(1, WORKER, hang_seconds=0.5, seconds=0.1)
    pool.fill()
    try:
        async with asyncio.timeout(WAIT):
            while not pool._waiting:
                await asyncio.sleep(0.01)
            first = pool._waiting[0].process
            first.signal(signal.SIGSTOP)
            await first.exited.wait()
            while not any(one.process is not first for one in pool._waiting):
                await asyncio.sleep(0.01)
        assert first.returncode == -signal.SIGKILL
    finally:
        await pool.close()


async def test_a_pool_that_cannot_start_processes_tries_again() -> None:
    """The server has too many open files for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool = StandbyPool(1, WORKER, hang_seconds=60.0, seconds=0.1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        pool.fill()
        async with asyncio.timeout(WAIT):
            while pool._wait == pool._seconds:
                await asyncio.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            while not pool._waiting:
                await asyncio.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await pool.close()


@pytest.mark.parametrize("dead", [1, 2])
async def test_one_that_died_unseen_becomes_no_rank(pool: StandbyPool, dead: int) -> None:
    """The next one does, else a new process. The group gets no sign of the dead one."""
    waiting, exits = [*pool._waiting], list[int]()
    for one in waiting[:dead]:  # the event loop does not run meanwhile
        one.process.signal(signal.SIGKILL)
        assert select.select([one.descriptors], [], [], WAIT)[0]
        assert not one.process.ended.is_set()
    callbacks = replace(NO_CALLBACKS, on_exit=lambda rank, _code: exits.append(rank))
    shared = SharedMemory(os.memfd_create("segment"))
    unused: Any = None
    local = LocalRanks(CONFIG, unused)
    async with asyncio.timeout(WAIT):
        process, inside = await local.spawn(7, shared, callbacks, pool)
        for one in waiting[:dead]:
            await one.process.ended.wait()
            assert one.process._channel._transport.is_closing() and one.descriptors.fileno() == -1
        found = next((one for one in waiting if one.process is process), None)
        assert found is (waiting[1] if dead == 1 else None) and inside == (found and found.inside)
        assert process.rank == 7 and process.returncode is None and not exits
        process.signal(signal.SIGKILL)
        await process.exited.wait()
    process.close()
    os.close(shared.segment)
    assert exits == [7]


async def test_one_that_still_imports_is_not_for_those_who_wait(pool: StandbyPool) -> None:
    """It imports behind all that is busy on its cores: a new process is sooner there."""
    first, second = pool._waiting
    async with asyncio.timeout(WAIT):
        await first.imported.wait()
        await second.imported.wait()
        first.imported.clear()
        assert pool.take(imported=True) is second
        assert pool.take(imported=True) is None
        assert pool.take() is first
        for one in (first, second):
            one.process.signal(signal.SIGKILL)
            await one.process.exited.wait()
            one.close()


async def test_nothing_is_left_of_a_pool_that_is_closed(pool: StandbyPool) -> None:
    waiting = [one.process for one in pool._waiting]
    assert len(waiting) == 2
    await pool.close()
    assert all(process.exited.is_set() for process in waiting)
    pool.fill()
    assert pool.take() is None and pool._filling.done()
