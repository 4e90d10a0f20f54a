"""Experts move while streams run, and no token changes. Oracle: a server whose experts stay."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.scheduler.balance import imbalance, rank_rows
from ep_server.scheduler.placement_file import placement_values
from tests.support.frontend import Recorder
from tests.support.ranks.serving import begun, longest
from tests.support.raw_client import RawClient

RANKS, STREAMS, NEW, WAIT = 3, 4, 40, 300.0
LONG = 200  # new tokens of streams that a loss must find running
PROMPT = [1, 5, 3, 7, 2, 9, 4, 6]


@dataclass
class Moves(Recorder):
    loads: list[int] = field(default_factory=list)
    imbalances: list[tuple[float, float]] = field(default_factory=list)

    def on_experts_moved(self, loads: int) -> None:
        self.loads.append(loads)

    def on_imbalance(self, mean: float, worst: float) -> None:
        self.imbalances.append((mean, worst))


@asynccontextmanager
async def serving(heard: Moves, **options: object) -> AsyncIterator[tuple[Server, RawClient]]:
    config = Config.from_values(
        {
            "grpc.port": 0,
            "model.path": str(DEMO_MODEL),
            "model.dtype": "float32",
            "exchange.reduction": "source",
            "exchange.timeout_seconds": 60.0,
            "parallel.ranks": RANKS,
            "parallel.threads_per_rank": 1,
            "resilience.spare_slots": "2",
            "resilience.standby": 0,
            "resilience.balance_seconds": 0.2,
            "scheduler.kv_blocks": 128,
            "scheduler.max_step_tokens": 32,
            "scheduler.max_running": 16,
        }
        | options
    )
    server = Server(config, ServedModel.load(config.model), RankProcesses(config, outlive=True), heard)
    await server.start(lambda *_: None)
    try:
        async with RawClient(server.address) as client:
            yield server, client
        server.engine.check_integrity()
    finally:
        await server.drain()
        await server.stop()


async def tokens(client: RawClient, new: int = NEW) -> list[list[int]]:
    calls = [
        client.complete(
            PROMPT * (1 + n), max_new_tokens=new, ignore_eos=True, seed=n, temperature=1.5, timeout=WAIT
        )
        for n in range(STREAMS)
    ]
    outputs = await asyncio.gather(*calls)
    return [output.token_ids for output in outputs]


@pytest.mark.asyncio
async def test_streams_across_moves_keep_their_tokens(tmp_path: Path) -> None:
    """Also across a loss afterwards. Another server starts with the placement that was reached."""
    async with serving(Moves()) as (server, client):
        expected, long = await tokens(client), await tokens(client, LONG)
        assert server.engine.balancer.rows == []
    heard = Moves()
    async with serving(heard, **{"resilience.balance": "auto"}) as (server, client):
        balancer = server.engine.balancer
        first = balancer.placement
        async with asyncio.timeout(WAIT):
            while not sum(heard.loads):
                assert await tokens(client) == expected
        assert await tokens(client) == expected
        now = balancer.placement
        assert first is not None and now is not None and now != first
        before, after = (
            [
                imbalance(rank_rows(rows, placement, layer, balancer.live).values())
                for layer, rows in enumerate(balancer.rows)
            ]
            for placement in (first, now)
        )
        assert sum(after) < sum(before)
        assert max(worst for _, worst in heard.imbalances) > 1.03
        assert heard.lost == []
        file = tmp_path / "placement.json"
        target = ["--address", server.address]
        shown = await asyncio.to_thread(run_command, "placement", "--export", str(file), *target)
        assert "16 experts in 8 slots on each of ranks 0, 1, 2" in shown
        pids = {rank.rank: rank.pid for rank in (await client.server_info()).rank_info}
        streams = await begun(lambda: tokens(client, LONG), lambda: longest(server.engine) > 0)
        os.kill(pids[max(active.rank for active in server.engine._requests)], signal.SIGKILL)
        assert await streams == long
        async with asyncio.timeout(WAIT):
            while not heard.recovered:  # they may have ended before the loss was noticed
                await asyncio.sleep(0.01)
    async with serving(Moves(), **{"resilience.placement": str(file)}) as (server, client):
        assert server.engine.balancer.placement is not None
        assert placement_values(server.engine.balancer.placement) == json.loads(file.read_text())
        assert await tokens(client) == expected


def run_command(*arguments: str) -> str:
    line = [sys.executable, "-m", "ep_server", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=WAIT).stdout


@pytest.mark.slow
@pytest.mark.asyncio
async def test_zipf_routing_is_balanced_while_streams_run() -> None:
    heard = Moves()
    auto = {"resilience.balance": "auto", "resilience.balance_seconds": 1.0, "model.routing": "zipf"}
    async with serving(heard, **auto) as (_, client):
        async with asyncio.timeout(WAIT):
            while not heard.imbalances or heard.imbalances[-1][0] > 1.1:
                assert [len(one) for one in await tokens(client)] == [NEW] * STREAMS
    assert max(mean for mean, _ in heard.imbalances) > 1.3
