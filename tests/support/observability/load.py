"""A server of the demo model and a steady load on it: as many requests in flight at any time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from ep_server.cli.app import App, assemble
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.config import Config
from ep_server.ranks.launcher import RankProcesses
from tests.support.raw_client import RawClient

DIGITS = 10  # of the vocabulary: any of them may stand in a prompt


@asynccontextmanager
async def served(ranks: int, module: str = "ep_server.ranks.life", **flags: object) -> AsyncIterator[App]:
    """A server that serves, on ranks that run `module`."""
    basis = {
        "model.path": str(DEMO_MODEL),
        "parallel.ranks": ranks,
        "parallel.threads_per_rank": 1,
        "grpc.port": 0,
        "metrics.port": 0,
    }
    config = Config.load(flags={**basis, **flags}, environ={})
    async with assemble(config, RankProcesses(config, module=module)) as app:
        await app.server.start(lambda *_: None)
        try:
            yield app
        finally:
            await app.server.stop()


@asynccontextmanager
async def steady_load(client: RawClient, streams: int) -> AsyncIterator[None]:
    """Decodes on `streams` streams, each a new request when one ends. Raises: what a request raised."""
    callers = [asyncio.create_task(_decode(client, random.Random(seed))) for seed in range(streams)]
    try:
        yield
    finally:
        for caller in callers:
            caller.cancel()
        for ended in await asyncio.gather(*callers, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def _decode(client: RawClient, draw: random.Random) -> None:
    while True:
        prompt = [draw.randrange(DIGITS) for _ in range(24)]
        await client.complete(prompt, max_new_tokens=48, ignore_eos=True, timeout=60)


async def odd_requests(client: RawClient) -> None:
    """One that is cancelled, one that is refused, one whose deadline passes."""
    dropped = client.generate([1] * 8, max_new_tokens=200, ignore_eos=True)
    async for event in dropped:
        if event.WhichOneof("event") == "tokens":
            dropped.cancel()
            break
    for wrong in ({"temperature": -1.0}, {"max_new_tokens": 2000, "ignore_eos": True, "timeout": 0.05}):
        try:
            await client.complete([1] * 8, **wrong)
        except grpc.RpcError:
            continue
        raise AssertionError(f"{wrong} was answered")
