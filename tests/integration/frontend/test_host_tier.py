"""A session whose history was evicted goes on from the host tier: the same tokens, usage and counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import ep_server
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from tests.support.frontend import WAIT
from tests.support.raw_client import RawClient

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
BLOCK = 4
PROMPT = [(5 * n + n * n) % 13 for n in range(50)]
FIELDS = {"max_new_tokens": 9, "ignore_eos": True, "temperature": 0.0, "timeout": WAIT}


@pytest.mark.asyncio
async def test_an_evicted_session_goes_on() -> None:
    values = {
        "grpc.port": 0,
        "metrics.port": 0,
        "model.path": str(MODEL),
        "model.dtype": "float32",
        "parallel.ranks": 1,
        "parallel.threads_per_rank": 1,
        "scheduler.block_size": BLOCK,
        "scheduler.kv_blocks": 24,
        "scheduler.max_step_tokens": 32,
        "scheduler.kv_host_gib": 0.01,
    }
    config = Config.from_values(values)
    server = Server(config, ServedModel.load(config.model), RankProcesses(config))
    await server.start(lambda *_: None)
    try:
        async with RawClient(server.address) as client:
            first = await client.complete(PROMPT, **FIELDS)
            history = [*PROMPT, *first.token_ids, 3, 1]
            alone = await client.complete(history, bypass_prefix_cache=True, **FIELDS)
            for other in range(3):  # each fills most of the cache
                await client.complete([other] * 80, **FIELDS)
            second = await client.complete(history, **FIELDS)
            assert second.token_ids == alone.token_ids
            known = (len(PROMPT) + 8) // BLOCK * BLOCK  # the last token was drawn, not run
            assert second.finished.usage.cached_tokens == known
            async with asyncio.timeout(WAIT):  # ranks report when they park
                while (await client.loads()).ranks[0].prefix_host_hits == 0:
                    await asyncio.sleep(0.01)
            assert (await client.loads()).ranks[0].prefix_hits >= known
            told = server.engine.rank_statistics[0]
            ready = server.engine.ready[0]
            block = ready.kv_bytes // ready.kv_blocks
            assert told.counters["kv_loaded_bytes"] == told.load.prefix_host_hits // BLOCK * block
            assert told.counters["kv_saved_bytes"] >= told.load.host_blocks_used * block > 0
            assert ready.kv_host_bytes == told.load.host_blocks_total * block
    finally:
        await server.drain()
        await server.stop()
