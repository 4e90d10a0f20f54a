"""Profiles of real ranks: what they write, where, when they end, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import ep_server
from ep_server.config import Config
from ep_server.engine.active_request import Submission
from ep_server.engine.engine import Engine, EngineSettings
from ep_server.engine.profiles import ProfileLimits
from ep_server.errors import InvalidArgument, SwitchedOff, Unavailable, WrongState
from ep_server.ranks.launcher import RankProcesses
from ep_server.records import Request, Sampling, Stopping
from ep_server.testing.fake_ranks import FakeRanks

RANKS, WAIT = 2, 120.0
DEMO = Path(ep_server.__file__).parent / "assets" / "demo_model"


@asynccontextmanager
async def started(directory: Path, seconds: float = WAIT) -> AsyncIterator[Engine]:
    values = {"model.path": str(DEMO), "parallel.ranks": RANKS, "parallel.threads_per_rank": 1}
    config = Config.from_values({**values, "scheduler.kv_blocks": 64, "profile.directory": str(directory)})
    limits = ProfileLimits(str(directory), seconds, steps=50)
    engine = Engine(RankProcesses(config), EngineSettings(max_context=128, profiles=limits))
    try:
        async with asyncio.timeout(WAIT):
            await engine.start(lambda *_: None)
            yield engine
    finally:
        await engine.stop()


async def generate(engine: Engine, length: int) -> None:
    request = Request(str(length), 0, (1, 2, 3), Sampling(temperature=0.0, seed=1), Stopping(length))
    ((_, stream),) = engine.submit([Submission(request)])
    while (await stream.read()).completion is None:
        pass
    stream.close()


async def test_every_rank_writes_its_trace_and_its_steps(tmp_path: Path):
    folder = tmp_path / "profiles"
    folder.mkdir()
    async with started(folder) as engine:
        name = await engine.start_profile()
        with pytest.raises(WrongState, match=f"profile {name} is running"):
            await engine.start_profile()
        await generate(engine, 8)
        files = [Path(file) for file in await engine.stop_profile()]
        with pytest.raises(WrongState, match="no profile is running"):
            await engine.stop_profile()

        # A bound on steps ends the recording; an idle server's profile is empty, and the server goes on.
        second = await engine.start_profile(steps=3)
        await generate(engine, 8)
        short = [Path(file) for file in await engine.stop_profile()]
        await engine.start_profile(steps=3)
        await engine.stop_profile()
        with pytest.raises(InvalidArgument, match=r"num_steps = 51: must be 1 to profile\.max_steps = 50"):
            await engine.start_profile(steps=51)

        folder.rename(tmp_path / "moved")
        with pytest.raises(Unavailable, match=r"rank 0: profile.directory: cannot create .*No such file"):
            await engine.start_profile()
        (tmp_path / "moved").rename(folder)
        await engine.start_profile()
        await engine.stop_profile()
        await generate(engine, 2)

    expected = [f"{name}-rank{rank}.{kind}.json" for rank in range(RANKS) for kind in ("trace", "steps")]
    assert [file.name for file in files] == expected and {file.parent for file in files} == {folder}
    assert second != name and len(list(folder.iterdir())) == 4 * 2 * RANKS
    steps = [json.loads(file.read_text()) for file in files[1::2]]
    assert [one["rank"] for one in steps] == list(range(RANKS))
    assert steps[0]["steps"][0]["tokens"] == 3 and len(steps[0]["steps"]) >= 8
    numbers = [[step["step"] for step in one["steps"]] for one in steps]
    assert numbers[0] == numbers[1] == list(range(numbers[0][0], numbers[0][0] + len(numbers[0])))
    for file in files[::2]:
        events = {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}
        assert {f"ProfilerStep#{index}" for index in range(len(numbers[0]))} <= events
        assert any(event.startswith("aten::") for event in events)
    assert [len(json.loads(file.read_text())["steps"]) for file in short[1::2]] == [3] * RANKS


async def test_a_profile_nobody_stops_ends_by_itself(tmp_path: Path):
    engine = Engine(FakeRanks(RANKS), EngineSettings(128, profiles=ProfileLimits(str(tmp_path), 0.01)))
    await engine.start(lambda *_: None)
    await engine.start_profile()
    async with asyncio.timeout(WAIT):
        while engine._profiles._name:
            await asyncio.sleep(0)
    await engine.start_profile()
    assert len(await engine.stop_profile()) == RANKS
    await engine.stop()


async def test_profiles_without_a_folder_are_refused():
    engine = Engine(FakeRanks(), EngineSettings(max_context=128))
    await engine.start(lambda *_: None)
    with pytest.raises(SwitchedOff, match=r"profile\.directory is empty"):
        await engine.start_profile()
    await engine.stop()
