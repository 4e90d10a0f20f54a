"""Ranks as the server starts them, without the gRPC front: rounds of requests, timed from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ep_server.config import Config
from ep_server.errors import EpServerError
from ep_server.orders import OrderDone
from ep_server.ranks.launcher import RankProcesses
from ep_server.records import (
    KvEventBatch,
    LossCause,
    PromptLogprobs,
    RankStatistics,
    Request,
    Sampling,
    Stopping,
    TokenEvent,
)


class Round:
    """Listens to one round of requests: their tokens, when each message came, and the statistics after it."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.times: dict[int, list[float]] = {}
        self.statistics: dict[int, RankStatistics] = {}
        self.left: set[int] = set()
        self.lost = ""
        self.changed = asyncio.Event()
        self.next_number = 1

    def on_tokens(self, rank: int, events: Sequence[TokenEvent]) -> None:
        self.times.setdefault(rank, []).append(time.perf_counter())
        for event in events:
            self.tokens.setdefault(event.number, []).append(event.token_id)
            if event.finish is not None:
                self.left.discard(event.number)
        if not self.left:
            self.changed.set()

    def on_statistics(self, statistics: RankStatistics) -> None:
        self.statistics[statistics.rank] = statistics
        self.changed.set()

    def on_freed(self, rank: int, number: int) -> None:
        pass

    def on_prompt_logprobs(self, rank: int, scored: PromptLogprobs) -> None:
        pass

    def on_request_failed(self, rank: int, number: int, error: EpServerError) -> None:
        self.on_lost(rank, f"request {number}: {error}", 0.0)

    def on_running(self, rank: int, sequences: int) -> None:
        pass

    def on_begun(self, rank: int, numbers: Sequence[int]) -> None:
        pass

    def on_kv_events(self, batch: KvEventBatch) -> None:
        pass

    def on_order_done(self, rank: int, done: OrderDone) -> None:
        pass

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        """Reported by on_lost."""

    def on_lost(self, rank: int, message: str, seconds: float) -> None:
        self.lost = f"rank {rank}: {message}"
        self.changed.set()

    async def until(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.lost:
                raise SystemExit(self.lost)
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), max(0.001, deadline - time.monotonic()))


@asynccontextmanager
async def group(
    checkpoint: Path, ranks: int, threads: int, dtype: str
) -> AsyncIterator[tuple[RankProcesses, Round]]:
    """Ranks as the server starts them, without the gRPC front."""
    config = Config.from_values(
        {
            "model.path": str(checkpoint),
            "model.dtype": dtype,
            "parallel.ranks": ranks,
            "parallel.threads_per_rank": threads,
            "parallel.overlap": "off",
            "scheduler.kv_blocks": 1024,
            "scheduler.max_step_tokens": 1024,
            "scheduler.prefix_cache": False,
        }
    )
    processes, listener = RankProcesses(config), Round()
    await processes.start(listener, lambda *_: None)
    try:
        yield processes, listener
    finally:
        await processes.stop()


async def generate(processes: RankProcesses, on: Round, prompts: list[list[int]], new: int) -> float:
    """Runs all prompts and returns the seconds until the last token; `on` then holds this round alone."""
    first = on.next_number
    on.next_number += len(prompts)
    requests = [
        Request(str(n), n, tuple(prompt), Sampling(temperature=0.0), Stopping(new))
        for n, prompt in enumerate(prompts, start=first)
    ]
    on.tokens, on.times, on.statistics = {}, {}, {}
    on.left = {request.number for request in requests}
    start = time.perf_counter()
    for index, request in enumerate(requests):
        processes.submit(index % processes.num_ranks, request)
    await on.until(lambda: not on.left)
    seconds = time.perf_counter() - start
    # A rank reports when it parks: after that it is idle and its counts are whole.
    await on.until(lambda: len(on.statistics) == processes.num_ranks)
    await asyncio.sleep(0.1)
    return seconds
