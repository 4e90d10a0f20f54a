"""Rank processes on GPUs: the tokens of transformers, with graphs, chunks and a step ahead."""

from __future__ import annotations

import pytest
import torch

from ep_server.ranks.launcher import RankProcesses
from tests.harness.answers import Answers
from tests.harness.rank_group import Recorder, greedy, rank_config

pytestmark = pytest.mark.gpu
COUNT = 24
SIZES = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()] or [1]


async def drawn(model: Answers, ranks: int, **fields: object) -> dict[int, tuple[int, ...]]:
    """Tokens of every prompt twice over, spread over the ranks."""
    settings = {"parallel__device": "cuda", "scheduler__max_running": 6, **fields}
    group, heard = RankProcesses(rank_config(model.path, ranks, **settings)), Recorder()
    prompts = list(enumerate(model.prompts * 2, start=1))
    await group.start(heard, heard.on_progress)
    try:
        for number, prompt in prompts:
            group.submit(number % ranks, greedy(number, prompt, COUNT))
        await heard.until(lambda: len(heard.finished) == len(prompts), 120)
        assert not heard.failed and not heard.lost
    finally:
        await group.stop()
    assert group.exit_codes == [0] * ranks
    return {number: tuple(heard.tokens[number]) for number, _ in prompts}


@pytest.mark.parametrize("ranks", SIZES)
async def test_float32_tokens_are_those_of_transformers(
    answers: dict[str, Answers], family: str, ranks: int
) -> None:
    """Rows travel through host memory here: float32 has no other way."""
    model = answers[family]
    expected = {n: tokens[:COUNT] for n, tokens in enumerate(model.tokens * 2, start=1)}
    assert await drawn(model, ranks) == expected


@pytest.mark.parametrize("ranks", SIZES)
async def test_bfloat16_over_nvlink_begins_as_float32_does(
    answers: dict[str, Answers], family: str, ranks: int
) -> None:
    """Later tokens may differ: a near tie turns with any rounding."""
    model = answers[family]
    whole = await drawn(model, ranks, model__dtype="bfloat16")
    first = [whole[n][0] == tokens[0] for n, tokens in enumerate(model.tokens * 2, start=1)]
    assert sum(first) > len(first) // 2
    assert all(len(tokens) == COUNT for tokens in whole.values())
