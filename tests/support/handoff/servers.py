"""Two servers on the demo model, each with rank processes of its own, for hand-offs between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ep_server
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from tests.support.frontend import WAIT
from tests.support.raw_client import Output, RawClient

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"


@dataclass
class Running:
    """A server, its ranks and a client of it."""

    server: Server
    ranks: RankProcesses
    client: RawClient

    def count(self, name: str) -> int:
        """A counter over all ranks, as they reported last."""
        reports = self.server.engine.rank_statistics.values()
        return sum(report.counters.get(name, 0) for report in reports)


@asynccontextmanager
async def serving(role: str, **options: Any) -> AsyncIterator[Running]:
    """options: by dotted name with __ for the dot."""
    values = {
        "grpc.port": 0,
        "metrics.port": 0,
        "model.path": str(MODEL),
        "model.dtype": "float32",
        "parallel.ranks": 1,
        "parallel.threads_per_rank": 1,
        "scheduler.block_size": 4,
        "scheduler.kv_blocks": 256,
        "scheduler.max_step_tokens": 16,
        "handoff.role": role,
        **{name.replace("__", "."): value for name, value in options.items()},
    }
    config = Config.from_values(values)
    recover = config.resilience.on_rank_loss == "recover"
    ranks = RankProcesses(config, outlive=recover)
    server = Server(config, ServedModel.load(config.model), ranks)
    await server.start(lambda *_: None)
    try:
        async with RawClient(server.address) as client:
            yield Running(server, ranks, client)
    finally:
        await server.drain()
        await server.stop()


@asynccontextmanager
async def pair(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Running, Running]]:
    """A prefill server and a decode server, with these options."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving("prefill", **(prefill or {})))
        second = await stack.enter_async_context(serving("decode", **(decode or {})))
        yield first, second


async def held(server: Running, prompt: list[int], **fields: Any) -> Any:
    """Prefills a prompt and returns its KvHandle once it is complete."""
    output = await server.client.complete(prompt, max_new_tokens=1, hold_kv=True, timeout=WAIT, **fields)
    return output.kv_handle


async def continued(server: Running, prompt: list[int], handle: Any, **fields: Any) -> Output:
    """Generates with the blocks of a handle."""
    return await server.client.complete(prompt, kv_handle=handle, timeout=WAIT, **fields)


@asynccontextmanager
async def prefilling(server: Running, prompt: list[int], **fields: Any) -> AsyncIterator[Any]:
    """The KvHandle of a prefill that runs; it is read to its end at the end of the block."""
    call = server.client.generate(prompt, max_new_tokens=1, hold_kv=True, timeout=WAIT, **fields)
    events = aiter(call)
    async for event in events:
        if event.HasField("kv_handle"):
            break
    yield event.kv_handle
    async for _ in events:
        pass


async def counted(server: Running, name: str, least: int) -> None:
    """Waits until the ranks have reported a counter."""
    async with asyncio.timeout(WAIT):
        while server.count(name) < least:
            await asyncio.sleep(0.01)


async def used(server: Running) -> int:
    """KV blocks of all ranks, as they reported last."""
    return sum(rank.kv_blocks_used for rank in (await server.client.loads()).ranks)


async def something_held(server: Running) -> None:
    """Once its ranks have reported it: they do so now and then."""
    async with asyncio.timeout(WAIT / 2):
        while not await used(server):
            await asyncio.sleep(0.02)


async def nothing_held(server: Running, before: int = 0) -> None:
    """Long before handoff.hold_seconds. before: blocks that others hold."""
    async with asyncio.timeout(WAIT / 2):
        while await used(server) > before:
            await asyncio.sleep(0.02)
