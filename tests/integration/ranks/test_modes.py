"""Whole groups whose steps use the exchange of many rows: the same tokens, whoever takes part."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ep_server.ranks.launcher import RankProcesses
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import Recorder, greedy, rank_config

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
