"""A server whose ranks tests take away, for ranks that run as on a GPU or on GPUs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ep_server.config import Config
from ep_server.engine.engine import Engine
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.local_ranks import WORKER
from ep_server.ranks.restarting import RestartingRanks
from tests.support.frontend import Recorder
from tests.support.raw_client import Output, RawClient

WAIT = 240.0
T = TypeVar("T")


def longest(engine: Engine) -> int:
    """Tokens of the longest output that runs."""
    return max((len(active.output) for active in engine._requests), default=0)


async def begun(
    start: Callable[[], Coroutine[Any, Any, T]], condition: Callable[[], bool]
) -> asyncio.Task[T]:
    """Starts requests and waits for the condition; starts them again if all ended before anyone saw it."""
    async with asyncio.timeout(WAIT):
        while True:
            running = asyncio.create_task(start())
            while not running.done():
                if condition():
                    return running
                await asyncio.sleep(0.001)
            running.result()


@dataclass
class Serving:
    """ranks: of the server; a loss that all ranks outlive leaves the same group."""

    server: Server
    ranks: RestartingRanks
    client: RawClient
    heard: Recorder

    @property
    def group(self) -> RankProcesses:
        assert isinstance(self.ranks.group, RankProcesses)
        return self.ranks.group

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT):
            while not condition():
                await asyncio.sleep(0.001)

    async def run(self, asked: Sequence[dict[str, Any]]) -> list[Output]:
        calls = [self.client.complete(one["token_ids"], **_rest(one), timeout=WAIT) for one in asked]
        return list(await asyncio.gather(*calls))

    async def begun(self, asked: Sequence[dict[str, Any]], tokens: int) -> asyncio.Task[list[Output]]:
        """Requests that run, one of them with so many tokens."""
        return await begun(lambda: self.run(asked), lambda: longest(self.server.engine) >= tokens)

    async def lose(
        self, rank: int, after: int, asked: Sequence[dict[str, Any]], number: signal.Signals = signal.SIGKILL
    ) -> list[Output]:
        """Runs requests, ends a rank once one of them has so many tokens, and waits until all serve again."""
        recovered = len(self.heard.recovered)
        running = await self.begun(asked, after)
        everyone, process = self.group.live, self.group._board.processes[rank]
        process.signal(number)
        outputs = await running
        await self.until(
            lambda: len(self.heard.recovered) > recovered and not self.server.engine._delivery.down
        )
        await self.until(lambda: self.group.live == everyone)
        assert self.group._board.processes[rank] is not process
        return outputs


def _rest(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "token_ids"}


@asynccontextmanager
async def serving(config: Config, module: str = WORKER) -> AsyncIterator[Serving]:
    """module: of the rank processes."""
    ranks = RestartingRanks(lambda: RankProcesses(config, module=module, outlive=True))
    heard = Recorder()
    server = Server(config, ServedModel.load(config.model), ranks, heard)
    await server.start(lambda *_: None)
    try:
        async with RawClient(server.address) as client:
            yield Serving(server, ranks, client, heard)
        server.engine.check_integrity()
    finally:
        await server.drain()
        await server.stop()
