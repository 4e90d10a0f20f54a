"""A server whose ranks a test takes away, and requests whose outputs must not change."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.config import Config
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.local_ranks import WORKER
from ep_server.ranks.restarting import RestartingRanks
from tests.support.frontend import Recorder
from tests.support.ranks.rank_group import greedy
from tests.support.ranks.serving import begun, longest, serving
from tests.support.raw_client import Output, RawClient

RANKS = 4
WAIT = 120.0
NEW = 160
PROMPT = [1, 5, 3, 7, 2, 9, 4, 6]
# Everything whose state a new rank must build again. Prompts of up to 200 tokens run in chunks of 32.
ASKED: list[dict[str, Any]] = [
    {"token_ids": PROMPT, "temperature": 0.0},
    {"token_ids": PROMPT * 25, "temperature": 1.5, "seed": 1},
    {"token_ids": PROMPT, "temperature": 1.5, "seed": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"token_ids": PROMPT, "temperature": 2.0, "seed": 3, "num_sequences": 2},
    {"token_ids": PROMPT, "temperature": 2.0, "seed": 4, "stop_strings": ["77"], "min_new_tokens": 60},
    {
        "token_ids": PROMPT,
        "temperature": 2.0,
        "seed": 5,
        "output_logprobs": True,
        "top_n": 2,
        "prompt_logprobs": 1,
    },
    {"token_ids": PROMPT, "temperature": 2.0, "seed": 6, "regex": "[0-9]{150}", "ignore_eos": False},
    {"token_ids": PROMPT, "temperature": 1.5, "seed": 7, "cache_salt": "a"},
]
UNKNOWN = 1 << 40  # number of a request that the engine does not have
_UNDISTURBED: dict[str, list[tuple[Any, ...]]] = {}


def shortened(tokens: int) -> list[dict[str, Any]]:
    """These requests with outputs of so many tokens."""
    made = [one | {"max_new_tokens": tokens} for one in ASKED]
    for one in made:
        if "min_new_tokens" in one:
            one["min_new_tokens"] = tokens // 3
    return made


@dataclass
class Losing:
    """A server whose ranks a test takes away."""

    server: Server
    ranks: RestartingRanks
    client: RawClient
    heard: Recorder

    def group(self) -> RankProcesses:
        assert isinstance(self.ranks.group, RankProcesses)
        return self.ranks.group

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT):
            while not condition():
                await asyncio.sleep(0.001)

    async def begun(self, asked: list[dict[str, Any]], tokens: int) -> asyncio.Task[list[Output]]:
        """Requests that run, one of them with so many tokens."""
        return await begun(lambda: run_all(self.client, asked), lambda: longest(self.server.engine) >= tokens)

    async def amid(self, asked: list[dict[str, Any]], tokens: int) -> asyncio.Task[list[Output]]:
        """Like begun(), but all ranks are stopped: nothing ends before go_on()."""
        async with asyncio.timeout(WAIT):
            while True:
                running = await self.begun(asked, tokens)
                processes = [psutil.Process(pid) for pid in self.group().pids]
                for process in processes:
                    process.suspend()
                while any(process.status() != psutil.STATUS_STOPPED for process in processes):
                    await asyncio.sleep(0.001)
                for _ in range(10):  # rounds of the loop, which reads what they have sent
                    await asyncio.sleep(0)
                if self.server.engine._requests:
                    return running
                self.go_on()  # again: all ended meanwhile
                await running

    def go_on(self) -> None:
        """All ranks that are left."""
        for rank in range(RANKS):
            self.signal(rank, signal.SIGCONT)

    async def recovered(self, times: int, *, everyone: bool = True) -> None:
        """Until the server has recovered so often in all, and serves with all ranks again."""
        await self.until(lambda: len(self.heard.recovered) >= times and not self.server.engine._delivery.down)
        await self.until(lambda: not everyone or len(self.group().live) == RANKS)

    def signal(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """To the process that has this place now, unless it has ended."""
        if (process := self.group()._board.processes.get(rank)) is not None:
            process.signal(number)

    def break_(self, rank: int) -> None:
        """Raises an exception in a step of it: a token that the front never lets pass."""
        self.ranks.submit(rank, greedy(UNKNOWN, (10**6,), 5))


@asynccontextmanager
async def losing(hang_seconds: float = 60.0, module: str = WORKER, **fields: Any) -> AsyncIterator[Losing]:
    """hang_seconds: so long that a busy machine looks like no hang. module: of the rank processes."""
    config = Config.from_values(
        {
            "grpc.port": 0,
            "model.path": str(DEMO_MODEL),
            "model.dtype": "float32",
            "exchange.reduction": "source",
            "exchange.timeout_seconds": hang_seconds,
            "parallel.ranks": RANKS,
            "parallel.threads_per_rank": 1,
            "resilience.max_losses": 1000,
            "resilience.rank_losses": 0,
            "scheduler.kv_blocks": 128,
            "scheduler.max_step_tokens": 32,
            "scheduler.max_running": 16,
        }
        | {name.replace("__", "."): value for name, value in fields.items()}
    )
    async with serving(config, module) as made:
        yield Losing(made.server, made.ranks, made.client, made.heard)


async def run_all(client: RawClient, asked: list[dict[str, Any]]) -> list[Output]:
    fields = {"max_new_tokens": NEW, "ignore_eos": True, "timeout": WAIT}
    calls = [client.complete(one["token_ids"], **{**fields, **_rest(one)}) for one in asked]
    return list(await asyncio.gather(*calls))


def _rest(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "token_ids"}


async def undisturbed(client: RawClient, asked: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What callers get where nothing is lost, from the first server of this process that is asked.

    Neither placement nor batches change what the demo model draws, so every server of it gives the same.
    """
    key = repr(asked)
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = [seen(output) for output in await run_all(client, asked)]
    return _UNDISTURBED[key]


def seen(output: Output) -> tuple[Any, ...]:
    """All that a caller gets, without times."""
    usage = output.finished.usage
    scores = [
        [(one.logprob, *(top.token_id for top in one.top)) for one in many]
        for many in (output.logprobs, output.prompt_logprobs)
    ]
    counts = usage.prompt_tokens, usage.output_tokens
    return (output.token_ids, output.text, scores, output.finished.reason, counts, *map(seen, output.others))
