"""A request's logits and tokens are the same bits alone and among others, on CPU ranks, in every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.cpu.sampler import Sampler
from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.records import Request, SampledToken, Sampling, Stopping
from ep_server.scheduler.batch import SchedulerLimits
from ep_server.scheduler.rank_scheduler import RankScheduler
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.models.checkpoints import CASES, EXPERTS, HIDDEN, TOP_K, VOCAB, Tiny
from tests.support.models.driver import BLOCK

NEW = 24
OTHERS = 11
LIMITS = SchedulerLimits(
    max_running=16, max_step_tokens=37, block_size=BLOCK, kv_blocks=512, prefix_cache=True, max_context=160
)


class Recorder(Sampler):
    """A sampler that keeps the logits of one request."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.logits: list[torch.Tensor] = []

    def sample(self, numbers: Sequence[int], logits: torch.Tensor) -> list[SampledToken]:
        self.logits += [row.clone() for number, row in zip(numbers, logits, strict=True) if number == 0]
        return super().sample(numbers, logits)


@dataclass
class Answer:
    """Of request 0. logits: [V] for each of its tokens."""

    tokens: list[int]
    logits: list[torch.Tensor]


def request(number: int, prompt: Sequence[int], sampling: Sampling) -> Request:
    return Request(str(number), number, tuple(prompt), sampling, Stopping(NEW))


def run(path: Path, dtype: str, micro_batches: int, requests: Sequence[Request]) -> Answer:
    """The real scheduler, model and sampler of one rank; request 0 comes first, the others while it runs."""
    model = load_model(LoadParams(str(path), 0, (0,) * EXPERTS, dtype, threads=2))
    payload = Payload.FP32 if dtype == "float32" else Payload.BF16
    spec = ExchangeSpec(0, 1, (0,) * EXPERTS, LIMITS.max_step_tokens, HIDDEN, TOP_K, payload)
    scheduler, sampler = RankScheduler(LIMITS), Recorder()
    runner = model.runner(ReferenceExchange(spec), sampler, LIMITS.kv_blocks, BLOCK)
    waiting, tokens = list(requests), []
    while waiting or scheduler.has_work:
        if waiting:
            scheduler.add(waiting[0])
            runner.add(waiting.pop(0))
        batch = scheduler.plan()
        with torch.inference_mode():
            sampled = runner.run(batch, micro_batches)
        for event in scheduler.commit(batch, sampled):
            tokens += [event.token_id] if event.number == 0 else []
            if event.finish is not None:
                runner.remove(event.number)
    return Answer(tokens, sampler.logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_tokens_do_not_depend_on_other_requests(tiny: Callable[[str], Tiny], name: str, dtype: str) -> None:
    model = tiny(name)
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=7)
    prompts = [tuple(prompt) for prompt in model.prompts]
    first = request(0, prompts[3], sampling)
    others = [
        request(n, prompts[n % 4] + (n,), replace(sampling, seed=n, top_k=n * 10))
        for n in range(1, OTHERS + 1)
    ]
    alone = run(model.path, dtype, 1, [first])
    together = run(model.path, dtype, 2, [first, *others])
    assert len(alone.tokens) == NEW
    for position, (one, other) in enumerate(zip(alone.logits, together.logits, strict=True)):
        assert torch.equal(one, other), f"logits of token {position}: {(one - other).abs().max()}"
    assert alone.tokens == together.tokens
