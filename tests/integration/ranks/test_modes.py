"""Whole groups whose steps use the exchange of many rows: the same tokens, whoever takes part."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.config import Config
from ep_server.ranks.launcher import RankProcesses
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import Recorder, greedy, rank_config
from tests.support.ranks.serving import serving

pytestmark = pytest.mark.asyncio

FLOATS = {"exchange__reduction": "source", "model__dtype": "float32"}


async def tokens_of(tiny: Tiny, ranks: int, **settings: Any) -> tuple[list[tuple[int, ...]], Recorder]:
    """The answers to all prompts on every rank, and what was reported at the end."""
    group, heard = RankProcesses(rank_config(tiny.path, ranks, **settings)), Recorder()
    await group.start(heard, heard.on_progress)
    try:
        numbers = itertools.count(1)
        for rank in range(ranks):
            for prompt, answer in zip(tiny.prompts, tiny.tokens, strict=True):
                group.submit(rank, greedy(next(numbers), prompt, len(answer), dp_rank=rank))
        last = next(numbers) - 1
        await heard.until(lambda: len(heard.finished) == last)
        await heard.parked(ranks, last)
    finally:
        await group.stop()
    assert heard.failed == {} and heard.lost == []
    return [tuple(heard.tokens[number]) for number in range(1, last + 1)], heard


@pytest.mark.parametrize(
    ("ranks", "overlap"), [(2, "on"), (4, "off"), pytest.param(2, "auto", marks=pytest.mark.slow)]
)
async def test_many_rows_give_the_tokens_of_transformers(tiny: Tiny, ranks: int, overlap: str) -> None:
    found, heard = await tokens_of(tiny, ranks, parallel__overlap=overlap, exchange__mode="normal", **FLOATS)
    assert found == [*tiny.tokens] * ranks
    assert heard.counter("normal_steps") == heard.counter("run_steps")
    assert heard.counter("normal_from") == [1] * ranks


async def test_low_latency_gives_the_same(tiny: Tiny) -> None:
    found, heard = await tokens_of(tiny, 2, exchange__mode="low_latency", **FLOATS)
    assert found == [*tiny.tokens] * 2
    assert heard.counter("normal_steps") == heard.counter("normal_from") == [0, 0]


async def test_ranks_agree_on_what_they_measured(tiny: Tiny) -> None:
    """Whatever was faster here: the ranks use it alike."""
    found, heard = await tokens_of(tiny, 2, exchange__mode="auto", **FLOATS)
    assert found == [*tiny.tokens] * 2
    assert len(set(heard.counter("normal_from"))) == len(set(heard.counter("normal_steps"))) == 1
    if heard.counter("normal_from")[0] == 0:
        assert heard.counter("normal_steps")[0] == 0


async def test_a_rank_alone_has_no_choice(tiny: Tiny) -> None:
    found, heard = await tokens_of(tiny, 1, exchange__mode="normal", **FLOATS)
    assert found == [*tiny.tokens]
    assert heard.counter("normal_steps") == [0]


ASKED = [
    {"token_ids": [1, 5, 3, 7], "max_new_tokens": 12, "ignore_eos": True, "temperature": heat, "seed": 3}
    for heat in (0.0, 1.5)
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["normal", pytest.param("auto", marks=pytest.mark.slow)])
async def test_ranks_of_many_rows_outlive_each_other(mode: str) -> None:
    """A killed rank comes back, to ranks whose steps use the exchange of many rows. No output changes."""
    config = Config.from_values(
        {
            "grpc.port": 0,
            "exchange.mode": mode,
            "exchange.reduction": "source",
            "exchange.timeout_seconds": 60.0,
            "model.dtype": "float32",
            "model.path": str(DEMO_MODEL),
            "parallel.ranks": 2,
            "parallel.threads_per_rank": 1,
            "resilience.max_losses": 100,
            "resilience.rank_losses": 0,
            "scheduler.kv_blocks": 64,
        }
    )
    async with serving(config) as served:
        expected = [output.token_ids for output in await served.run(ASKED)]
        for rank in (1, 0):
            pids = served.group.pids
            outputs = await served.lose(rank, 6, ASKED)
            assert [output.token_ids for output in outputs] == expected
            assert served.group.pids[1 - rank] == pids[1 - rank], "the other rank keeps its process"
        assert [output.token_ids for output in await served.run(ASKED)] == expected


async def test_ranks_that_join_a_single_one_measure_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Between their steps; no output changes, whichever way turns out to be faster."""
    config = Config.from_values(
        {
            "grpc.port": 0,
            "exchange.mode": "auto",
            "exchange.reduction": "source",
            "model.dtype": "float32",
            "model.path": str(DEMO_MODEL),
            "parallel.ranks": 1,
            "parallel.max_ranks": 2,
            "parallel.threads_per_rank": 1,
            "resilience.rank_losses": 0,
            "resilience.spare_slots": "auto",
            "scheduler.kv_blocks": 128,
            "scheduler.max_step_tokens": 40,
        }
    )
    asked = [{**one, "max_new_tokens": 48} for one in ASKED]
    async with serving(config) as served:
        expected = [output.token_ids for output in await served.run(asked)]
        capfd.readouterr()
        running = asyncio.ensure_future(served.run(asked))
        await served.server.engine.scale(2, [])
        assert [output.token_ids for output in await running] == expected
        for _ in range(2):  # more steps than there are turns
            assert [output.token_ids for output in await served.run(asked)] == expected
        told = capfd.readouterr().err
        assert len(re.findall(r"steps use the exchange of many rows (?:never|from \d+ tokens)", told)) == 1
        assert re.search(r"us: 16: \d+ / \d+, 32: \d+ / \d+, 40: \d+ / \d+", told)
        assert await served.lose(1, 6, asked)
        assert [output.token_ids for output in await served.run(asked)] == expected
