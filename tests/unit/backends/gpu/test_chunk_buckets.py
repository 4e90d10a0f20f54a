"""Steps that hold chunks of prompts beside single tokens, padded to a bucket as a captured graph has them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from ep_server.backends.gpu import decoder
from ep_server.backends.gpu.graphs import GraphKey, buckets_with_chunks
from ep_server.records import StepBatch
from ep_server.scheduler import RankScheduler, SchedulerLimits
from ep_server.scheduler.prompt_budget import Room
from tests.support.gpu.runners import COUNT, SingleTokens, Together, gpu_runner, staggered
from tests.support.models.checkpoints import Tiny
from tests.support.models.driver import BLOCK, BLOCKS
from tests.support.ranks.rank_group import greedy

FORMS = (GraphKey(4), GraphKey(20))


@pytest.fixture(autouse=True)
def one_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels choose nothing in it."""


@pytest.mark.parametrize("sequences", [1, 8, 63, 64, 200, 256, 1024])
@pytest.mark.parametrize("most", [1, 64, 65, 512, 2000, 8192])
def test_buckets_grow_by_a_quarter_up_to_the_largest_step(sequences: int, most: int) -> None:
    sizes = buckets_with_chunks(sequences, most)
    if most <= sequences:
        assert sizes == []
        return
    assert sizes[-1] == most and sizes[0] > sequences and sizes == sorted(set(sizes))
    assert all(size % 64 == 0 for size in sizes[:-1])
    assert all(b - a <= max(a // 4 + 64, 64) for a, b in pairwise([sequences, *sizes]))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2-lite-yarn"])
def test_chunks_beside_single_tokens(tiny: Callable[[str], Tiny], name: str) -> None:
    """None of these steps is run as it is: all have a bucket."""
    model, prompts = tiny(name), 3
    tokens, buckets = staggered(gpu_runner(model.path, FORMS), model, prompts)
    assert tokens == {number: list(model.tokens[number][:COUNT]) for number in range(prompts)}
    assert set(buckets) == {key.bucket for key in FORMS}


def test_single_tokens_by_a_kernel_of_their_own(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all sequences of the bucket, chunks as padding, and what it leaves there is replaced."""
    monkeypatch.setattr(decoder, "hopper_attention", Together)
    monkeypatch.setattr(decoder, "HopperAttentionStep", SingleTokens)
    model, prompts = tiny("qwen3_moe"), 2
    tokens, _ = staggered(gpu_runner(model.path, FORMS), model, prompts)
    assert tokens == {number: list(model.tokens[number][:COUNT]) for number in range(prompts)}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_prompts_by_single_tokens_run_graphs_of_decode_steps(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    """Most of their rows are not sampled, beside streams and other prompts."""
    monkeypatch.setattr(Room, "fit", lambda room, start, whole: min(room.tokens, 1))
    model, prompts = tiny("qwen3_moe"), 2
    runner = gpu_runner(model.path, (GraphKey(4, micro_batches), GraphKey(20)))
    tokens, buckets = staggered(runner, model, prompts, micro_batches)
    assert tokens == {number: list(model.tokens[number][:COUNT]) for number in range(prompts)}
    assert set(buckets) == {4}


def test_a_rank_without_chunks_runs_the_bucket_of_those_with(tiny: Callable[[str], Tiny]) -> None:
    """Of single tokens, or idle: the ranks agree on the largest bucket that one of them has."""
    model = tiny("qwen3_moe")
    runner = gpu_runner(model.path, FORMS)
    with torch.inference_mode():
        runner.graphs.capture()
        limits = SchedulerLimits(
            max_running=8, max_step_tokens=20, block_size=BLOCK, kv_blocks=BLOCKS, prefix_cache=True,
            max_context=128,
        )  # fmt: skip
        scheduler, drawn = RankScheduler(limits), list[int]()
        request = greedy(1, model.prompts[0], COUNT)
        runner.add(request)
        scheduler.add(request)
        while scheduler.has_work:
            batch = scheduler.plan()
            sampled = runner.collect(runner.launch(batch, 1, 20))
            drawn += [event.token_id for event in scheduler.commit(batch, sampled)]
        assert runner.collect(runner.launch(StepBatch((), 0), 1, 20)) == []
    assert drawn == list(model.tokens[0][:COUNT])


def test_a_step_beyond_all_buckets_is_run_as_it_is(tiny: Callable[[str], Tiny]) -> None:
    runner = gpu_runner(tiny("qwen3_moe").path, FORMS)
    assert [runner.graphs.bucket_of(rows) for rows in (1, 4, 5, 20, 21)] == [4, 4, 20, 20, 0]
    assert [runner.micro_batches_of(bucket, 2) for bucket in (4, 20)] == [1, 1]
