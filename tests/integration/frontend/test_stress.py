"""Two hundred streams at once, finished, cancelled, aborted, timed out or refused at random: no leftovers."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

import ep_server
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.frontend import Recorder, serving
from tests.support.ranks.rank_group import Leftovers
from tests.support.raw_client import RawClient

STREAMS = 200
WAYS = ("finish", "drop", "drop early", "abort", "deadline", "timeout", "bad", "same id")
ENDS = {
    "finish": {"OK", "RESOURCE_EXHAUSTED"},
    "drop": {"dropped", "OK", "RESOURCE_EXHAUSTED"},
    "drop early": {"dropped", "RESOURCE_EXHAUSTED"},
    "abort": {"CANCELLED", "OK", "RESOURCE_EXHAUSTED"},
    "deadline": {"DEADLINE_EXCEEDED", "OK", "RESOURCE_EXHAUSTED"},
    "timeout": {"DEADLINE_EXCEEDED", "OK", "RESOURCE_EXHAUSTED"},
    "bad": {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"},  # a full server does not read it
    "same id": {"OK", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"},
}


async def one(client: RawClient, way: str, vocabulary: int, source: random.Random, name: str) -> str:
    """Runs one request in one way; returns how it ended."""
    fields = {"max_new_tokens": source.randrange(1, 60), "ignore_eos": True, "request_id": name}
    fields |= {
        "bad": {"top_p": 2.0},
        "deadline": {"deadline_ms": source.randrange(1, 40)},
        "timeout": {"timeout": source.uniform(0.001, 0.04)},
        "same id": {"request_id": f"shared-{source.randrange(5)}"},
    }.get(way, {})
    stop_after = source.randrange(1, 30)
    call = client.generate([source.randrange(vocabulary) for _ in range(source.randrange(1, 20))], **fields)
    seen = 0
    try:
        if way == "drop early":
            await call.read()
            call.cancel()
            return "dropped"
        async for event in call:
            seen += event.HasField("tokens")
            if way == "drop" and seen >= stop_after:
                call.cancel()
                return "dropped"
            if way == "abort" and seen == stop_after:
                await client.abort(name)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def storm(client: RawClient, vocabulary: int, seconds: float, at_least: int) -> Counter[str]:
    """STREAMS readers, each in a loop, until the time is over and so many requests have ended."""
    ends: Counter[str] = Counter()
    started = time.monotonic()

    async def reader(index: int) -> None:
        source, turn = random.Random(index), 0
        while time.monotonic() - started < seconds or sum(ends.values()) < at_least:
            way = source.choice(WAYS)
            end = await one(client, way, vocabulary, source, f"{index}-{turn}")
            assert end in ENDS[way], (way, end)
            ends[end] += 1
            turn += 1

    async with asyncio.TaskGroup() as group:
        for index in range(STREAMS):
            group.create_task(reader(index))
    return ends


async def steps(ranks: FakeRanks, heard: Recorder) -> None:
    """None until the queue has been full, then one now and then: else steps would leave no queue."""
    while "RESOURCE_EXHAUSTED" not in heard.refused:
        await asyncio.sleep(0)
    while True:
        for _ in range(40):
            await asyncio.sleep(0)
        ranks.step()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_nothing_is_left_of_a_storm() -> None:
    async with serving(FakeRanks(2), scheduler__max_running=8, scheduler__max_queue=8) as served:
        await served.client.complete([1], max_new_tokens=1)
        await served.until(lambda: bool(served.heard.accept_waits))  # probes have their connection
        tasks, files = len(asyncio.all_tasks()), kinds()
        served.ranks.hold()
        stepping = asyncio.ensure_future(steps(served.ranks, served.heard))
        ends = await storm(served.client, 257, seconds=0, at_least=1000)
        stepping.cancel()
        served.ranks.release()
        assert set(ends) == {status for statuses in ENDS.values() for status in statuses}
        await served.idle()
        await served.until(lambda: len(asyncio.all_tasks()) <= tasks)
        served.ranks.check_integrity(idle=True)
        served.server.engine.check_integrity()
        assert served.server.engine.statistics().open_streams == 0
        assert served.heard.load == (0, 0)
        assert served.heard.admitted == len(served.heard.finished) == len(served.ranks.requests)
        unseen = sum(ends.values()) + 1 - served.heard.admitted - len(served.heard.refused)
        assert 0 <= unseen <= ends["DEADLINE_EXCEEDED"]  # timed out on their way to the server
        assert kinds() - files == Counter()


def kinds() -> Counter[str]:
    """What the descriptors of this process are, but for pollers: gRPC adds one under load and keeps it."""
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return Counter(re.sub(r"\d+", "", link) for link in links if not link.endswith(("poll]", "eventfd]")))


@pytest.mark.slow
async def test_a_minute_of_storm_on_real_ranks() -> None:
    model = str(Path(ep_server.__file__).parent / "assets" / "demo_model")
    values = {"grpc.port": 0, "model.path": model, "parallel.ranks": 2, "parallel.threads_per_rank": 1}
    config = Config.from_values({**values, "scheduler.kv_blocks": 512, "scheduler.max_queue": 100})
    async with serving(FakeRanks(2)) as served:  # gRPC keeps a few descriptors for the whole process
        await served.client.complete([1], max_new_tokens=1)
    before, open_before, heard, ranks = Leftovers(), kinds(), Recorder(), RankProcesses(config)
    server = Server(config, ServedModel.load(config.model), ranks, heard)
    try:
        await server.start(lambda *_: None)
        async with RawClient(server.address) as client:
            await client.complete([1], max_new_tokens=1)
            tasks, files = len(asyncio.all_tasks()), descriptors()
            ends = await storm(client, 14, seconds=60, at_least=1)
            assert len(ends) >= 4
            async with asyncio.timeout(60):
                while server.engine.statistics().in_flight or len(asyncio.all_tasks()) > tasks:
                    await asyncio.sleep(0)
                while any(rank.kv_blocks_used or rank.running for rank in (await client.loads()).ranks):
                    await asyncio.sleep(0)
            server.engine.check_integrity()
            assert heard.admitted == len(heard.finished) and heard.load == (0, 0)
            assert descriptors() <= files
    finally:
        await server.drain()
        await server.stop()
    assert ranks.exit_codes == [0, 0]  # each has recounted its requests and KV blocks at its end
    left = Leftovers().new_since(before)
    left.pop("descriptors", None)  # counted by kind instead
    assert left == {} and kinds() - open_before == Counter()
