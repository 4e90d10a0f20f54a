"""What the engine relies on, asked of FakeRanks and of rank processes alike: one suite for both."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import ep_server
from ep_server.config import Config
from ep_server.errors import EpServerError
from ep_server.orders import FlushCache, OrderDone
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.protocol import Ranks
from ep_server.records import (
    FinishReason,
    KvEventBatch,
    LossCause,
    PromptLogprobs,
    RankStatistics,
    Request,
    Sampling,
    Stopping,
    TokenEvent,
)
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.ranks.cache_mirror import CacheMirror

WAIT = 120.0
RANKS = 2
GREEDY = Sampling(temperature=0.0, seed=1)


class Heard:
    """A RankListener that keeps everything."""

    def __init__(self) -> None:
        self.events: defaultdict[int, list[TokenEvent]] = defaultdict(list)
        self.scored: defaultdict[int, list[PromptLogprobs]] = defaultdict(list)
        self.rank_of: dict[int, int] = {}
        self.freed: list[tuple[int, int]] = []
        self.statistics: dict[int, RankStatistics] = {}
        self.mirrors = {rank: CacheMirror() for rank in range(RANKS)}
        self.done: dict[int, OrderDone] = {}
        self.running: dict[int, int] = {}
        self.most_running: defaultdict[int, int] = defaultdict(int)
        self.begun: defaultdict[int, set[int]] = defaultdict(set)
        self.lost: list[str] = []
        self.changed = asyncio.Event()

    def on_tokens(self, rank: int, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self.events[event.number].append(event)
            assert event.number in self.begun[rank]
            assert self.rank_of.setdefault(event.number, rank) == rank
        self.changed.set()

    def on_prompt_logprobs(self, rank: int, scored: PromptLogprobs) -> None:
        self.scored[scored.number].append(scored)

    def on_freed(self, rank: int, number: int) -> None:
        self.freed.append((rank, number))
        self.changed.set()

    def on_request_failed(self, rank: int, number: int, error: EpServerError) -> None:
        raise error

    def on_statistics(self, statistics: RankStatistics) -> None:
        self.statistics[statistics.rank] = statistics
        self.changed.set()

    def on_running(self, rank: int, sequences: int) -> None:
        self.running[rank] = sequences
        self.most_running[rank] = max(self.most_running[rank], sequences)
        self.changed.set()

    def on_begun(self, rank: int, numbers: Sequence[int], adding: int = 0, copied: int = 0) -> None:
        assert not self.begun[rank] & set(numbers)
        self.begun[rank].update(numbers)

    def on_kv_events(self, batch: KvEventBatch) -> None:
        self.mirrors[batch.rank].apply(batch)
        self.changed.set()

    def on_order_done(self, rank: int, done: OrderDone) -> None:
        self.done[rank] = done
        self.changed.set()

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        pass

    def on_lost(self, rank: int, message: str, seconds: float) -> None:
        self.lost.append(message)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT):
            while not condition():
                assert not self.lost
                self.changed.clear()
                await self.changed.wait()

    def ended(self, number: int) -> bool:
        return bool(self.events[number]) and self.events[number][-1].finish is not None


def request(number: int, length: int, **fields: object) -> Request:
    return replace(Request(str(number), number, (1, 2, 3), GREEDY, Stopping(max_new_tokens=length)), **fields)


def fake() -> Ranks:
    return FakeRanks(RANKS)


def processes() -> Ranks:
    model = str(Path(ep_server.__file__).parent / "assets" / "demo_model")
    values = {"model.path": model, "parallel.ranks": RANKS, "parallel.threads_per_rank": 1}
    return RankProcesses(Config.from_values({**values, "scheduler.kv_blocks": 256}))


@pytest.mark.parametrize("make", [fake, processes])
async def test_conformance(make: Callable[[], Ranks]) -> None:
    ranks, heard, told = make(), Heard(), set()
    try:
        ready = await ranks.start(heard, lambda rank, stage, done, total: told.add((rank, done == total)))
        assert [one.rank for one in ready] == list(range(RANKS)) and ranks.num_ranks == RANKS
        assert all(one.kv_blocks > 0 and one.block_size > 0 for one in ready)
        assert {(rank, True) for rank in range(RANKS)} <= told

        # The same prompt, greedy, gives the same tokens on every rank; an output has one end.
        for number in (1, 2, 3):
            ranks.submit(number % RANKS, request(number, 5))
        await heard.until(lambda: all(map(heard.ended, (1, 2, 3))))
        outputs = [[event.token_id for event in heard.events[number]] for number in (1, 2, 3)]
        assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0]) == 5
        assert [event.finish for event in heard.events[1]] == [None] * 4 + [FinishReason.LENGTH]
        assert heard.rank_of == {number: number % RANKS for number in (1, 2, 3)}

        # A cancelled request is freed once and silent afterwards; unknown numbers are ignored.
        ranks.cancel(0, 1)
        ranks.cancel(0, 999)
        for long in itertools.count(100):  # again if it ended before
            ranks.submit(1, request(long, 2000))
            await heard.until(lambda n=long: len(heard.events[n]) >= 2)
            ranks.cancel(1, long)
            await heard.until(lambda n=long: heard.freed != [] or heard.ended(n))
            if not heard.ended(long):
                break
        assert heard.most_running[1] > 0
        count = len(heard.events[long])
        ranks.submit(1, request(5, 3))
        await heard.until(lambda: heard.ended(5))
        assert heard.freed == [(1, long)] and len(heard.events[long]) == count and not heard.ended(long)

        # Logprobs and stop tokens are the rank's part; they come with the token.
        sampling = replace(GREEDY, logprobs=2)
        stopping = Stopping(max_new_tokens=5, stop_token_ids=frozenset({outputs[0][0]}))
        ranks.submit(0, request(6, 5, sampling=sampling, stopping=stopping))
        await heard.until(lambda: heard.ended(6))
        (only,) = heard.events[6]
        assert only.finish is FinishReason.STOP_TOKEN and only.logprob is not None
        assert len(only.top) == 2 and only.top[0] == (only.token_id, only.logprob)

        # Parked, every rank has reported, and nothing is held.
        await heard.until(lambda: len(heard.statistics) == RANKS)
        await heard.until(lambda: all(s.load.running == 0 for s in heard.statistics.values()))
        assert all(s.load.kv_blocks_used == 0 for s in heard.statistics.values())
        assert not any(heard.running.values())

        # A watch that begins late, on parked ranks, shows what is cached; then every change, and a flush.
        ranks.watch_cache(on=True)
        await heard.until(lambda: all(mirror.complete for mirror in heard.mirrors.values()))
        prompt = tuple(1 + index % 7 for index in range(33))
        ranks.submit(1, request(7, 1, prompt_ids=prompt))
        await heard.until(lambda: heard.mirrors[1].holds(prompt))
        assert not heard.mirrors[0].holds(prompt)
        await heard.until(lambda: heard.ended(7))
        ranks.order(FlushCache(), 1)
        await heard.until(lambda: len(heard.done) == RANKS)
        assert all(done.number == 1 and not done.error for done in heard.done.values())
        assert heard.done[1].blocks > 0
        assert [len(mirror.blocks) for mirror in heard.mirrors.values()] == [0, 0]
        ranks.submit(1, request(8, 1, prompt_ids=prompt))
        await heard.until(lambda: heard.ended(8))
        assert heard.events[8][0].cached_tokens == 0
    finally:
        await ranks.stop()
        await ranks.stop()
    assert heard.lost == []
