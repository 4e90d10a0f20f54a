"""The same tokens when the real scheduler cuts the work: prefix-cached, preempted, chunked, overlapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.cpu.sampler import Sampler
from ep_server.backends.kv_copies import CpuCopies, NoCopies
from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.records import FinishReason, Request, Sampling, Stopping
from ep_server.scheduler.batch import SchedulerLimits
from ep_server.scheduler.rank_scheduler import RankScheduler
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.models.checkpoints import CASES, EXPERTS, HIDDEN, TOP_K, VOCAB, Tiny
from tests.support.models.driver import BLOCK

NEW = 24


class Rank:
    """Scheduler, sampler and model of one rank, stepped by hand."""

    def __init__(
        self, tiny: Tiny, kv_blocks: int, max_step_tokens: int, micro_batches: int, host_blocks: int = 0
    ) -> None:
        limits = SchedulerLimits(
            max_running=8,
            max_step_tokens=max_step_tokens,
            block_size=BLOCK,
            kv_blocks=kv_blocks,
            prefix_cache=True,
            max_context=160,
            host_blocks=host_blocks,
        )
        self.scheduler = RankScheduler(limits)
        self.micro_batches = micro_batches
        model = load_model(LoadParams(str(tiny.path), 0, (0,) * EXPERTS))
        spec = ExchangeSpec(0, 1, (0,) * EXPERTS, max_step_tokens, HIDDEN, TOP_K, Payload.FP32)
        self.runner = model.runner(ReferenceExchange(spec), Sampler(VOCAB), kv_blocks, BLOCK)
        self.copier = CpuCopies(self.runner.kv_cache, host_blocks) if host_blocks else NoCopies()

    def answer(self, prompts: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        """Greedy tokens of all prompts, admitted together."""
        tokens: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            greedy, stopping = Sampling(temperature=0.0, seed=0), Stopping(NEW)
            request = Request(str(number), number, prompt, greedy, stopping)
            self.scheduler.add(request)
            self.runner.add(request)
            tokens[number] = []
        while self.scheduler.has_work:
            self.scheduler.loaded(self.copier.loaded())
            batch = self.scheduler.plan()
            if (moves := self.scheduler.moves()) is not None:
                self.copier.start(moves)
            with torch.inference_mode():
                sampled = self.runner.run(batch, self.micro_batches)
            for event in self.scheduler.commit(batch, sampled):
                tokens[event.number].append(event.token_id)
                if event.finish is not None:
                    assert event.finish is FinishReason.LENGTH
                    self.runner.remove(event.number)
            self.scheduler.check_integrity()
        return [tuple(tokens[number]) for number in range(len(prompts))]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_prefix_cached(tiny: Callable[[str], Tiny], name: str, micro_batches: int) -> None:
    model = tiny(name)
    rank = Rank(model, kv_blocks=128, max_step_tokens=64, micro_batches=micro_batches)
    expected = [tokens[:NEW] for tokens in model.tokens]
    assert rank.answer(model.prompts) == expected
    assert rank.scheduler.load().prefix_hits == 0
    assert rank.answer(model.prompts) == expected
    hits = rank.scheduler.load().prefix_hits
    assert hits >= 32 + 16 + 4  # the full blocks of prompts of 33, 17 and 5 tokens
    extended = tuple(p + t[:3] for p, t in zip(model.prompts, model.tokens, strict=True))
    assert rank.answer(extended) == [tokens[3 : NEW + 3] for tokens in model.tokens]
    assert rank.scheduler.load().prefix_hits > hits


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_preempted_and_chunked(tiny: Callable[[str], Tiny], name: str) -> None:
    model = tiny(name)
    rank = Rank(model, kv_blocks=20, max_step_tokens=11, micro_batches=2)
    assert rank.answer(model.prompts) == [tokens[:NEW] for tokens in model.tokens]
    assert rank.scheduler.load().preemptions > 0


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_evicted_and_loaded_from_the_host(tiny: Callable[[str], Tiny], name: str) -> None:
    """Blocks are copied as bytes, so heads and latent rows come back as they were."""
    model = tiny(name)
    rank = Rank(model, kv_blocks=24, max_step_tokens=64, micro_batches=1, host_blocks=200)
    prompts = [(prompt,) for prompt in model.prompts]
    expected = [tokens[:NEW] for tokens in model.tokens]
    assert [rank.answer(prompt)[0] for prompt in prompts] == expected
    assert rank.scheduler.load().prefix_host_hits == 0
    assert [rank.answer(prompt)[0] for prompt in prompts] == expected
    load, counters = rank.scheduler.load(), rank.copier.counters()
    assert load.prefix_host_hits >= 16
    assert counters["kv_saved_bytes"] > counters["kv_loaded_bytes"] > 0
