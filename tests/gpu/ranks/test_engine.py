"""Rank processes on GPUs: the tokens of transformers, with graphs, chunks, a step ahead, overlap."""

from __future__ import annotations

import pytest
import torch

from ep_server.ranks.launcher import RankProcesses
from tests.support.models.answers import Answers
from tests.support.ranks.rank_group import Recorder, greedy, rank_config

pytestmark = pytest.mark.gpu
COUNT = 24
SIZES = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()] or [1]
# Of every size one micro-batch, of the largest two.
RUNS = [(ranks, "off") for ranks in SIZES] + [(SIZES[-1], "on")]
ALIKE = 4  # tokens of an answer: one of a prompt, the others of captured steps
# Of all checkpoints the one that the attention kernel for Hopper takes, in blocks of 16.
STREAMED, BLOCK = "qwen3_moe-wide-heads", 16
MANY = 64  # sequences of a rank: the least bucket whose micro-batches are chosen by their times


async def drawn(
    model: Answers, ranks: int, times: int = 2, **fields: object
) -> tuple[dict[int, tuple[int, ...]], Recorder]:
    """Tokens of every prompt so many times over, spread over the ranks; and what the ranks told."""
    settings = {"parallel__device": "cuda", "scheduler__max_running": 6, **fields}
    group, heard = RankProcesses(rank_config(model.path, ranks, **settings)), Recorder()
    prompts = list(enumerate(model.prompts * times, start=1))
    count = min(COUNT, len(model.tokens[0]))
    heard.ready = await group.start(heard, heard.on_progress)
    try:
        for number, prompt in prompts:
            group.submit(number % ranks, greedy(number, prompt, count))
        await heard.until(lambda: len(heard.finished) == len(prompts), 120)
        assert not heard.failed and not heard.lost
        await heard.parked(ranks, len(prompts))
    finally:
        await group.stop()
    assert group.exit_codes == [0] * ranks
    return {number: tuple(heard.tokens[number]) for number, _ in prompts}, heard


def begins_alike(model: Answers, tokens: dict[int, tuple[int, ...]], times: int = 2) -> bool:
    """Half of the answers begin as those of float32. Others may not: a near tie turns with any rounding.

    On the CPU it is three of four of every family, and none where a step goes wrong.
    """
    wanted = dict(enumerate(model.tokens * times, start=1))
    alike = [answer[:ALIKE] == wanted[n][:ALIKE] for n, answer in tokens.items()]
    return 2 * sum(alike) >= len(wanted) and all(len(answer) == COUNT for answer in tokens.values())


@pytest.mark.parametrize(("ranks", "overlap"), RUNS)
async def test_float32_tokens_are_those_of_transformers(
    answers: dict[str, Answers], family: str, ranks: int, overlap: str
) -> None:
    """Rows travel through host memory here: float32 has no other way."""
    model = answers[family]
    expected = {n: tokens[:COUNT] for n, tokens in enumerate(model.tokens * 2, start=1)}
    tokens, heard = await drawn(model, ranks, parallel__overlap=overlap)
    assert tokens == expected
    assert all((n > 0) == (overlap == "on") for n in heard.counter("overlap_steps"))


@pytest.mark.parametrize(("ranks", "overlap"), RUNS)
async def test_bfloat16_over_nvlink_begins_as_float32_does(
    answers: dict[str, Answers], family: str, ranks: int, overlap: str
) -> None:
    model = answers[family]
    fields = {"model__dtype": "bfloat16", "parallel__overlap": overlap, "scheduler__block_size": BLOCK}
    tokens, heard = await drawn(model, ranks, **fields)
    assert begins_alike(model, tokens)
    streamed = family == STREAMED and torch.cuda.get_device_capability()[0] == 9
    assert {ready.attention.split()[0] for ready in heard.ready} == {"streamed" if streamed else "triton"}
    assert all((n > 0) == (overlap == "on") for n in heard.counter("overlap_steps"))


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("kind", [STREAMED, "deepseek_v3"])
async def test_steps_without_graphs(answers: dict[str, Answers], kind: str, ranks: int) -> None:
    model = answers[kind]
    fields = {"model__dtype": "bfloat16", "parallel__graphs": False, "scheduler__block_size": BLOCK}
    tokens, heard = await drawn(model, ranks, **fields)
    assert begins_alike(model, tokens)
    assert not any(heard.counter("graph_steps"))


@pytest.mark.skipif(SIZES[-1] == 1, reason="needs two GPUs: one rank alone never overlaps by itself")
async def test_both_forms_of_a_large_step_are_tried(answers: dict[str, Answers]) -> None:
    model, ranks = answers["qwen3_moe"], SIZES[-1]
    times = -(-MANY * ranks // len(model.prompts))
    room = {"scheduler__max_running": MANY, "scheduler__max_step_tokens": 512, "scheduler__kv_blocks": 4096}
    tokens, heard = await drawn(
        model, ranks, times, model__dtype="bfloat16", parallel__overlap="auto", **room
    )
    assert begins_alike(model, tokens, times)
    overlapped, steps = heard.counter("overlap_steps"), heard.counter("run_steps")
    assert len(set(overlapped)) == 1 and 0 < overlapped[0] < steps[0]
