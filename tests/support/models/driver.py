"""Drives a ModelRunner the way a rank's scheduler does, in the simplest form: everything runs every step.

Blocks are handed out in a shuffled order, so that contiguity can never be relied on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.cpu.runner import ModelRunner
from ep_server.exchange.api import Exchange, ExchangeSpec, Payload
from ep_server.models.sizes import Dtype
from ep_server.records import Request, SampledToken, SeqSlice, StepBatch
from ep_server.testing.reference_exchange import ReferenceExchange

BLOCK = 4
BLOCKS = 256


class GreedySampler:
    """Takes the most likely token; keeps every row of logits it saw, by request number."""

    def __init__(self) -> None:
        self.logits: dict[int, list[torch.Tensor]] = {}

    def add(self, request: Request, output: Sequence[int] = ()) -> None:
        self.logits[request.number] = []

    def remove(self, number: int) -> None:
        del self.logits[number]

    def sample(self, numbers: Sequence[int], logits: torch.Tensor) -> list[SampledToken]:
        assert logits.dtype is torch.float32
        for number, row in zip(numbers, logits, strict=True):
            self.logits.setdefault(number, []).append(row.clone())
        return [SampledToken(n, int(row.argmax())) for n, row in zip(numbers, logits, strict=True)]


def alone(path: Path, dtype: str = "float32", max_tokens: int = 64) -> tuple[ModelRunner, RankModel]:
    """A model whose experts are all on this one rank."""
    from ep_server.models.families import read_spec

    model = load_model(LoadParams(str(path), 0, (0,) * read_spec(path).router.num_experts, dtype))
    exchange = ReferenceExchange(exchange_spec(model, 0, 1, (0,) * model.spec.router.num_experts, max_tokens))
    return runner(model, exchange), model


def exchange_spec(
    model: RankModel, rank: int, num_ranks: int, placement: tuple[int, ...], max_tokens: int = 64
) -> ExchangeSpec:
    payload = Payload.FP32 if model.dtype is Dtype.FLOAT32 else Payload.BF16
    return ExchangeSpec(
        rank, num_ranks, placement, max_tokens, model.spec.hidden, model.spec.router.top_k, payload
    )


def runner(model: RankModel, exchange: Exchange) -> ModelRunner:
    return model.runner(exchange, GreedySampler(), BLOCKS, BLOCK)


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    chunk: int = 64,
    budget: int = 64,
    micro_batches: int = 1,
    steps: int | None = None,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Greedy tokens of each prompt, all prompts running together.

    Args:
        chunk: most prompt tokens of one sequence in one step. budget: most tokens of a step.
        steps: run exactly so many steps, empty ones at the end; None stops when all prompts are done.
        numbers: request number of each prompt; 0, 1, 2 ... if None.
    """
    free = list(range(BLOCKS))
    random.Random(seed).shuffle(free)
    ids = [list(prompt) for prompt in prompts]
    done = [0] * len(ids)  # positions already in the cache
    blocks: list[list[int]] = [[] for _ in ids]
    taken = 0
    named = range(len(ids)) if numbers is None else numbers
    while steps is None or taken < steps:
        slices, left = [], budget
        for number, (seq, prompt) in enumerate(zip(ids, prompts, strict=True)):
            count = min(len(seq) - done[number], chunk, left)
            if count == 0 or len(seq) - len(prompt) == new_tokens:
                continue
            end = done[number] + count
            while len(blocks[number]) * BLOCK < end:
                blocks[number].append(free.pop())
            new, sample = seq[done[number] : end], end == len(seq)
            slices.append(SeqSlice(named[number], done[number], new, blocks[number], sample))
            done[number], left = end, left - count
        if not slices and steps is None:
            break
        batch = StepBatch(tuple(slices), sum(len(s.token_ids) for s in slices))
        with torch.inference_mode():
            tokens = runner.run(batch, micro_batches)
        assert [t.number for t in tokens] == [s.number for s in slices if s.sample]
        for token in tokens:
            ids[named.index(token.number)].append(token.token_id)
        taken += 1
    return [tuple(seq[len(prompt) :]) for seq, prompt in zip(ids, prompts, strict=True)]
