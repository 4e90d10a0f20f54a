"""Ranks of a running server are lost in every way there is. The oracle is an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.restarting import RestartingRanks
from tests.support.frontend import Recorder
from tests.support.ranks.rank_group import greedy
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

    async def recovered(self, times: int) -> None:
        """Until the server has recovered so often in all, and serves."""
        await self.until(lambda: len(self.heard.recovered) >= times and not self.server.engine._delivery.down)

    def signal(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """To the process that has this place now, unless it has ended."""
        self.group()._processes[rank].signal(number)

    def break_(self, rank: int) -> None:
        """Raises an exception in a step of it: a token that the front never lets pass."""
        self.ranks.submit(rank, greedy(UNKNOWN, (10**6,), 5))


@asynccontextmanager
async def losing(hang_seconds: float = 60.0) -> AsyncIterator[Losing]:
    """hang_seconds: so long that a busy machine looks like no hang."""
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
            "scheduler.kv_blocks": 128,
            "scheduler.max_step_tokens": 32,
            "scheduler.max_running": 16,
        }
    )
    ranks, heard = RestartingRanks(lambda: RankProcesses(config, outlive=True)), Recorder()
    server = Server(config, ServedModel.load(config.model), ranks, heard)
    await server.start(lambda *_: None)
    try:
        async with RawClient(server.address) as client:
            yield Losing(server, ranks, client, heard)
        server.engine.check_integrity()
    finally:
        await server.drain()
        await server.stop()


Loss = Callable[[Losing, random.Random], Awaitable[None]]


async def killed(losing: Losing, draw: random.Random) -> None:
    losing.signal(draw.randrange(RANKS))


async def stopped(losing: Losing, draw: random.Random) -> None:
    losing.signal(draw.randrange(RANKS), signal.SIGSTOP)  # longer than the hang timeout


async def broken(losing: Losing, draw: random.Random) -> None:
    losing.break_(draw.randrange(RANKS))


async def two_killed(losing: Losing, draw: random.Random) -> None:
    """At once, or one while the loss of the other is being noticed or repaired."""
    first, second = draw.sample(range(RANKS), 2)
    losing.signal(first)
    await asyncio.sleep(draw.choice([0.0, 0.1, draw.uniform(0.0, 1.0)]))
    losing.signal(second)


async def killed_twice(losing: Losing, draw: random.Random) -> None:
    """The process that takes the place of the lost one is killed while it starts."""
    group, rank = losing.group(), draw.randrange(RANKS)
    pid = group.pids[rank]
    losing.signal(rank)
    await losing.until(lambda: losing.group() is not group or group.pids[rank] != pid)
    if losing.group() is group:
        losing.signal(rank)


async def run_all(client: RawClient, asked: list[dict[str, Any]]) -> list[Output]:
    fields = {"max_new_tokens": NEW, "ignore_eos": True, "timeout": WAIT}
    calls = [client.complete(one["token_ids"], **{**fields, **_rest(one)}) for one in asked]
    return list(await asyncio.gather(*calls))


def _rest(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "token_ids"}


def seen(output: Output) -> tuple[Any, ...]:
    """All that a caller gets, without times."""
    usage = output.finished.usage
    scores = [
        [(one.logprob, *(top.token_id for top in one.top)) for one in many]
        for many in (output.logprobs, output.prompt_logprobs)
    ]
    counts = usage.prompt_tokens, usage.output_tokens
    return (output.token_ids, output.text, scores, output.finished.reason, counts, *map(seen, output.others))


async def lose(losing: Losing, loss: Loss, draw: random.Random, expected: list[Any]) -> None:
    """Loses ranks while all requests run, and compares what they give."""
    before = len(losing.heard.recovered)
    running = asyncio.ensure_future(run_all(losing.client, ASKED))
    tokens = draw.randrange(1, NEW - 60)
    await losing.until(
        lambda: max((len(a.output) for a in losing.server.engine._requests), default=0) >= tokens
    )
    await asyncio.sleep(draw.uniform(0.0, 0.01))
    await loss(losing, draw)
    async with asyncio.timeout(WAIT):
        outputs = await running
    assert [seen(output) for output in outputs] == expected, f"{loss.__name__} after {tokens} tokens"
    await losing.recovered(before + 1)


async def balanced(losing: Losing) -> None:
    """Every rank is alive, has reported since it parked, and holds nothing."""
    engine = losing.server.engine

    def empty() -> bool:
        loads = [engine.rank_statistics[rank].load for rank in range(RANKS)]
        counts = engine.statistics()
        front = (counts.in_flight, counts.open_streams, counts.running, counts.waiting)
        at_ranks = [(load.running, load.waiting, load.kv_blocks_used) for load in loads]
        return front == (0, 0, 0, 0) and at_ranks == [(0, 0, 0)] * RANKS

    await losing.until(empty)
    assert losing.group().exit_codes == [None] * RANKS


async def test_five_losses_change_no_output() -> None:
    draw = random.Random(11)
    async with losing() as lost:
        expected = [seen(output) for output in await run_all(lost.client, ASKED)]
        for loss in (killed, broken, killed):
            pids = lost.group().pids
            await lose(lost, loss, draw, expected)
            assert len(set(pids) & set(lost.group().pids)) == RANKS - 1, "the others keep their processes"
        lost.signal(2)  # with nothing to do
        await lost.recovered(4)
        await lose(lost, killed, draw, expected)
        await balanced(lost)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("loss", "times"), [(killed, 200), (two_killed, 50), (killed_twice, 20), (broken, 20), (stopped, 10)]
)
async def test_many_losses_change_no_output(loss: Loss, times: int) -> None:
    draw = random.Random(times)
    async with losing(3.0 if loss is stopped else 60.0) as lost:
        expected = [seen(output) for output in await run_all(lost.client, ASKED)]
        for _ in range(times):
            await lose(lost, loss, draw, expected)
        await balanced(lost)
