"""Rank processes on GPUs: the tokens of transformers, with graphs, chunks, a step ahead, overlap."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.answers import Answers
from tests.support.ranks.gpu_engine import COUNT, MANY, SIZES, begins_alike, drawn

pytestmark = pytest.mark.gpu
# Of every size one micro-batch, of the largest two.
RUNS = [(ranks, "off") for ranks in SIZES] + [(SIZES[-1], "on")]
# Of all checkpoints the one that the attention kernel for Hopper takes, in blocks of 16.
STREAMED, BLOCK = "qwen3_moe-wide-heads", 16


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
    hopper = family == STREAMED and torch.cuda.get_device_capability()[0] == 9
    assert {ready.attention.split()[0] for ready in heard.ready} == {"hopper" if hopper else "triton"}
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


@pytest.mark.skipif(SIZES[-1] == 1, reason="needs two GPUs")
@pytest.mark.parametrize("kind", [STREAMED, "deepseek_v3"])
@pytest.mark.parametrize("graphs", [True, False])
async def test_steps_of_many_rows(answers: dict[str, Answers], kind: str, graphs: bool) -> None:
    """Forced for all steps, or for none. Their sums have the same bits; the norms behind them do not."""
    model, ranks = answers[kind], SIZES[-1]
    fields = {"model__dtype": "bfloat16", "parallel__graphs": graphs, "scheduler__block_size": BLOCK}
    for mode in ("normal", "low_latency"):
        tokens, heard = await drawn(model, ranks, exchange__mode=mode, parallel__overlap="off", **fields)
        assert begins_alike(model, tokens)
        steps = heard.counter("run_steps") if mode == "normal" else [0] * ranks
        assert heard.counter("normal_steps") == steps


@pytest.mark.skipif(SIZES[-1] == 1, reason="needs two GPUs")
async def test_steps_use_what_was_faster(answers: dict[str, Answers]) -> None:
    model, ranks = answers["qwen3_moe"], SIZES[-1]
    tokens, heard = await drawn(model, ranks, model__dtype="bfloat16", exchange__mode="auto")
    assert begins_alike(model, tokens)
    assert len(set(heard.counter("normal_from"))) == len(set(heard.counter("normal_steps"))) == 1
