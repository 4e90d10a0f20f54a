"""Whole groups of real processes: the tokens of transformers, cancel, failure of one request, parking.

Each group is started once for all tests of its size; the tests share the work numbers that this gives.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import pytest
import pytest_asyncio

from ep_server.ranks.launcher import RankProcesses
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import BLOCK_SIZE, Leftovers, Recorder, greedy, rank_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

GROUPS = {1: "auto", 2: "on", 4: "off"}  # ranks: overlap
PARKED_SECONDS = 0.3


@dataclass
class Group:
    ranks: RankProcesses
    heard: Recorder
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    work_number: int = 0

    def submit(self, rank: int, prompt: Sequence[int], max_new: int, **fields: Any) -> int:
        """Returns the request's number, which is its work number too."""
        number = next(self.numbers)
        self.work_number = number
        bias = fields.pop("logit_bias", ())
        request = greedy(number, prompt, max_new, **fields)
        self.ranks.submit(rank, replace(request, sampling=replace(request.sampling, logit_bias=bias)))
        return number

    async def parked(self) -> None:
        await self.heard.parked(self.ranks.num_ranks, self.work_number)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=GROUPS)
async def group(request: pytest.FixtureRequest, tiny: Tiny) -> AsyncIterator[Group]:
    config = rank_config(tiny.path, request.param, parallel__overlap=GROUPS[request.param])
    before = Leftovers()
    ranks, heard = RankProcesses(config), Recorder()
    ready = await ranks.start(heard, heard.on_progress)
    assert [r.rank for r in ready] == list(range(request.param))
    assert [r.pid for r in ready] == ranks.pids
    assert {(r.kv_blocks, r.block_size) for r in ready} == {(128, BLOCK_SIZE)}
    yield Group(ranks, heard)
    await ranks.stop()
    await ranks.stop()
    assert Leftovers().new_since(before) == {}
    assert heard.lost == []


async def test_progress_is_reported_by_every_rank(group: Group) -> None:
    for rank in range(group.ranks.num_ranks):
        own = [(stage, done, total) for r, stage, done, total in group.heard.progress if r == rank]
        assert own == [*(("weights", n, 2) for n in range(3)), ("warm-up", 0, 1), ("warm-up", 1, 1)]


async def test_tokens_equal_transformers(group: Group, tiny: Tiny) -> None:
    """All prompts on every rank at once: prefill in chunks, batches of all sizes, idle ranks at the end."""
    heard, expected = group.heard, {}
    for rank in range(group.ranks.num_ranks):
        for prompt, answer in zip(tiny.prompts, tiny.tokens, strict=True):
            expected[group.submit(rank, prompt, len(answer), dp_rank=rank)] = (rank, answer)
    await heard.until(lambda: set(expected) <= set(heard.finished))
    assert {n: (heard.ranks[n], tuple(heard.tokens[n])) for n in expected} == expected
    assert heard.lost == []
    assert heard.failed == {}


async def test_a_request_on_one_rank_runs_while_the_others_idle(group: Group, tiny: Tiny) -> None:
    number = group.submit(group.ranks.num_ranks - 1, tiny.prompts[0], 64)
    await group.heard.until(lambda: number in group.heard.finished)
    assert tuple(group.heard.tokens[number]) == tiny.tokens[0]


async def test_parked_ranks_take_no_step(group: Group, tiny: Tiny) -> None:
    """Between two requests of three tokens: a rank that did not park would have voted thousands of times."""
    heard = group.heard

    async def ask() -> list[int]:
        group.submit(0, tiny.prompts[0], 3)
        await group.parked()
        reports = [heard.statistics[rank] for rank in range(group.ranks.num_ranks)]
        return [sum(report.histograms["vote/total"]) for report in reports]

    before = await ask()
    used = [psutil.Process(pid).cpu_times() for pid in group.ranks.pids]
    await asyncio.sleep(PARKED_SECONDS)
    now = [psutil.Process(pid).cpu_times() for pid in group.ranks.pids]
    after = await ask()
    # 3 steps that run and the vote that parks; ranks may vote again while a doorbell is on its way.
    assert all(4 <= b - a < 1000 for a, b in zip(before, after, strict=True))
    spent = [n.user + n.system - u.user - u.system for u, n in zip(used, now, strict=True)]
    assert max(spent) < PARKED_SECONDS / 2


async def test_cancel_frees_and_no_token_follows(group: Group, tiny: Tiny) -> None:
    heard, rank = group.heard, group.ranks.num_ranks - 1
    number = 0
    while number not in heard.freed:  # again if it finished before
        number = group.submit(rank, tiny.prompts[0], 100)
        await heard.until(lambda n=number: len(heard.tokens.get(n, [])) >= 3)
        group.ranks.cancel(rank, number)
        group.ranks.cancel(rank, number)  # ended by then: ignored
        group.ranks.cancel(rank, 10**9)
        await heard.until(lambda n=number: n in (*heard.freed, *heard.finished))
    count = len(heard.tokens[number])
    await group.parked()
    assert heard.freed.count(number) == 1
    assert len(heard.tokens[number]) == count < 100
    assert number not in heard.finished
    assert heard.statistics[rank].load.kv_blocks_used == 0


async def test_cancel_of_a_waiting_request_is_answered(group: Group, tiny: Tiny) -> None:
    """128 blocks of 4 hold three requests of 150 tokens; the fourth waits for room."""
    heard = group.heard
    numbers = [0]
    while numbers[-1] not in heard.freed:  # again if it finished before
        numbers = [group.submit(0, [token] * 140, 10) for token in range(4)]
        for number in reversed(numbers):
            group.ranks.cancel(0, number)
        await heard.until(lambda all_=set(numbers): all_ <= set(heard.freed) | set(heard.finished))
    await group.parked()


async def test_a_request_that_cannot_run_fails_alone(group: Group, tiny: Tiny) -> None:
    heard = group.heard
    bad = group.submit(0, tiny.prompts[0], 1000)  # longer than the model's context
    good = group.submit(0, tiny.prompts[1], 64)
    await heard.until(lambda: good in heard.finished and bad in heard.failed)
    assert "exceed the context of 160" in heard.failed[bad]
    assert tuple(heard.tokens[good]) == tiny.tokens[1]
    assert bad not in heard.tokens


async def test_a_request_whose_logits_break_fails_alone(group: Group, tiny: Tiny) -> None:
    """A neighbour in its steps gets the same tokens as alone, and the group goes on."""
    heard = group.heard
    good = group.submit(0, tiny.prompts[1], 64)
    bad = group.submit(0, tiny.prompts[0], 64, logit_bias=((0, math.inf),))
    await heard.until(lambda: good in heard.finished and bad in heard.failed)
    assert heard.failed[bad] == "rank 0: its logits hold NaN or infinity"
    assert tuple(heard.tokens[good]) == tiny.tokens[1]
    assert bad not in heard.tokens
    await group.parked()
    assert heard.statistics[0].load.kv_blocks_used == 0


async def test_more_than_the_kv_cache_holds(group: Group, tiny: Tiny) -> None:
    """Waiting and preempted requests end with the same tokens."""
    heard, expected = group.heard, {}
    for _ in range(4):
        for prompt, answer in zip(tiny.prompts, tiny.tokens, strict=True):
            expected[group.submit(0, prompt, len(answer), bypass_prefix_cache=True)] = answer
    await heard.until(lambda: set(expected) <= set(heard.finished))
    assert {number: tuple(heard.tokens[number]) for number in expected} == expected
    await group.parked()
    assert heard.statistics[0].load.preemptions > 0


async def test_statistics_add_up(group: Group, tiny: Tiny) -> None:
    heard, ranks = group.heard, group.ranks.num_ranks
    for rank in range(ranks):
        group.submit(rank, tiny.prompts[0], 3)
    await group.parked()
    assert sorted(heard.statistics) == list(range(ranks))
    for rank, record in heard.statistics.items():
        counters, sums = record.counters, record.sums
        assert record.rank == rank
        assert counters["run_steps"] <= record.load.steps
        assert sum(record.histograms["step/total"]) == counters["run_steps"]
        parts = ("plan", "vote", "attention", "router", "dispatch", "experts", "combine", "sample", "publish")
        assert (
            0 < sum(sums[f"step/{part}"] for part in parts) < sums["step/total"] * 1.5
        )  # warm-up counts too
        assert set(record.expert_tokens) == {e for e in range(6) if e * ranks // 6 == rank} or ranks == 4
        assert all(record.peer_wait_ns[("dispatch", peer)] > 0 for peer in range(ranks) if peer != rank)
        overlapped = counters.get("overlap_steps", 0)
        if GROUPS[ranks] == "on":
            assert overlapped == counters["run_steps"]
        elif GROUPS[ranks] == "off":
            assert overlapped == 0
    assert len(set(heard.counter("overlap_steps"))) == 1
    assert len(set(heard.counter("run_steps"))) == 1
