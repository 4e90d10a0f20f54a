"""Requests that edit their logits through whole steps of a GPU: the tokens of the engine of the CPU.

Steps are launched before the tokens of the last are known, padded to buckets, and sequences are preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.cpu.runner import ModelRunner
from ep_server.backends.cpu.sampler import Sampler
from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.models.families import read_spec
from ep_server.records import Request, SampledToken, Stopping
from ep_server.scheduler import RankScheduler, SchedulerLimits
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.gpu.runners import TOKENS, gpu_runner
from tests.support.models.checkpoints import Tiny
from tests.support.models.driver import BLOCK, BLOCKS, exchange_spec
from tests.support.ranks.rank_group import greedy

EDITS = {
    "repetition_penalty": 1.4,
    "presence_penalty": 1.1,
    "frequency_penalty": 0.4,
    "logit_bias": ((5, 1.5), (9, -2.0)),
    "logprobs": 2,
}


def requests(model: Tiny, count: int, prompt: int) -> list[Request]:
    """One plain, two that edit."""
    made = [greedy(n, tokens[:prompt], count) for n, tokens in enumerate(model.prompts[-3:])]
    early = Stopping(count, min_new_tokens=2, eos_token_ids=frozenset({3}))
    return [
        made[0],
        *(replace(one, sampling=replace(one.sampling, **EDITS), stopping=early) for one in made[1:]),
    ]


def run(
    runner: GpuRunner | ModelRunner, asked: Sequence[Request], ahead: int, blocks: int = BLOCKS
) -> tuple[dict[int, list[SampledToken]], int]:
    """Tokens by request, and how often a sequence was preempted."""
    limits = SchedulerLimits(
        max_running=8, max_step_tokens=TOKENS, block_size=BLOCK, kv_blocks=blocks,
        prefix_cache=True, max_context=128, ahead=ahead,
    )  # fmt: skip
    scheduler, tokens = RankScheduler(limits), dict[int, list[SampledToken]]()
    for request in asked:
        runner.add(request)
        scheduler.add(request)
    flying = deque()
    with torch.inference_mode():
        while scheduler.has_work:
            while len(flying) <= ahead and (batch := scheduler.plan()).slices:
                flying.append((batch, runner.launch(batch, 1, runner.bucket_of(batch))))
            batch, launched = flying.popleft()
            for event in scheduler.commit(batch, runner.collect(launched)):
                token = SampledToken(event.number, event.token_id, event.logprob, event.top)
                tokens.setdefault(event.number, []).append(token)
    return tokens, scheduler.load().preemptions


def on_the_cpu(model: Tiny, asked: Sequence[Request]) -> dict[int, list[SampledToken]]:
    placement = (0,) * read_spec(model.path).router.num_experts
    loaded = load_model(LoadParams(str(model.path), 0, placement, "float32"))
    exchange = ReferenceExchange(exchange_spec(loaded, 0, 1, placement, TOKENS))
    return run(loaded.runner(exchange, Sampler(loaded.spec.vocab_size), BLOCKS, BLOCK), asked, 0)[0]


def assert_same(drawn: dict[int, list[SampledToken]], expected: dict[int, list[SampledToken]]) -> None:
    assert drawn.keys() == expected.keys()
    for number, tokens in expected.items():
        assert [t.token_id for t in drawn[number]] == [t.token_id for t in tokens]
        for ours, theirs in zip(drawn[number], tokens, strict=True):
            assert (ours.logprob is None) == (theirs.logprob is None)
            given = [value for t in (ours, theirs) for value in (t.logprob or 0.0, *dict(t.top).values())]
            half = len(given) // 2
            assert torch.allclose(torch.tensor(given[:half]), torch.tensor(given[half:]), atol=1e-4)


def test_a_step_ahead_and_padded(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("qwen3_moe")
    asked = requests(model, 5, 9)
    runner = gpu_runner(model.path, (GraphKey(4),))
    with torch.inference_mode():
        runner.graphs.capture()
    assert_same(run(runner, asked, 1)[0], on_the_cpu(model, asked))


@pytest.mark.slow
def test_preempted_and_resumed(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("qwen3_moe")
    asked = requests(model, 7, 5)
    drawn, preemptions = run(gpu_runner(model.path), asked, 1, blocks=7)
    assert preemptions > 0
    assert_same(drawn, on_the_cpu(model, asked))
