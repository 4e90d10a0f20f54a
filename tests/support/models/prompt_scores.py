"""Log probabilities of prompts: those of transformers, and those of a runner that a scheduler drives."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_server.records import PromptLogprobs, StepBatch
from ep_server.scheduler import RankScheduler, SchedulerLimits
from tests.support.models.checkpoints import Tiny
from tests.support.models.driver import BLOCK
from tests.support.ranks.rank_group import greedy, joined

TOP = 3
TOLERANCE = 2e-5
CASES = "qwen3_moe", "deepseek_v2-lite-yarn"
SEQUENCES = 2  # of each prompt, as one call asks for them


def of_transformers(model: Tiny, prompt: Sequence[int]) -> torch.Tensor:
    """[prompt - 1, V] float32: of every token that could have come at position 1, 2 ..."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([list(prompt)])).logits[0, :-1]
    return logits.float().log_softmax(-1)


def check(found: PromptLogprobs, prompt: Sequence[int], expected: torch.Tensor, top: int = TOP) -> None:
    """Against of_transformers()."""
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(list(found.logprobs)), own, atol=TOLERANCE, rtol=0)
    ids = torch.tensor(list(found.top_ids), dtype=torch.int64).view(-1, top)
    values = torch.tensor(list(found.top_logprobs)).view(-1, top)
    torch.testing.assert_close(values, expected.topk(top).values, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(expected.gather(1, ids), values, atol=TOLERANCE, rtol=0)


@dataclass
class Scored:
    """parts: by prompt. tokens: by prompt and sequence. preemptions: of the run."""

    parts: dict[int, list[PromptLogprobs]]
    tokens: dict[tuple[int, int], list[int]]
    preemptions: int


def scored(runner: Any, model: Tiny, count: int, *, kv_blocks: int, **how: int) -> Scored:
    """Runs two sequences of each prompt, which share its blocks. Every second prompt is scored.

    how: `ahead`, `micro_batches`, and `bucket` 1 where the runner has graphs.
    """
    ahead, micro_batches = how.get("ahead", 0), how.get("micro_batches", 1)
    limits = SchedulerLimits(
        max_running=4, max_step_tokens=13, block_size=BLOCK, kv_blocks=kv_blocks,
        prefix_cache=True, max_context=128, ahead=ahead,
    )  # fmt: skip
    scheduler, found = RankScheduler(limits), Scored({}, {}, 0)
    for number in range(SEQUENCES * len(model.prompts)):
        at, index = divmod(number, SEQUENCES)
        request = greedy(number + 1, model.prompts[at], count, group=number + 1 - index)
        top = TOP if at % 2 and not index else None
        request = replace(request, sampling=replace(request.sampling, prompt_logprobs=top))
        runner.add(request)
        scheduler.add(request)
    flying: deque[tuple[StepBatch, Any]] = deque()
    with torch.inference_mode():
        while scheduler.has_work:
            while len(flying) <= ahead and (batch := scheduler.plan()).slices:
                bucket = runner.bucket_of(batch)
                flying.append((batch, runner.launch(batch, micro_batches if not bucket else 1, bucket)))
            batch, launched = flying.popleft()
            drawn = runner.collect(launched)
            for part in runner.prompt_logprobs(launched):
                found.parts.setdefault((part.number - 1) // SEQUENCES, []).append(part)
            for event in scheduler.commit(batch, drawn):
                found.tokens.setdefault(divmod(event.number - 1, SEQUENCES), []).append(event.token_id)
    found.preemptions = scheduler.load().preemptions
    return found


def check_all(found: Scored, model: Tiny, count: int) -> None:
    """Every scored prompt as transformers scores it, each position once, and the usual tokens."""
    asked = [number for number, prompt in enumerate(model.prompts) if number % 2 and len(prompt) > 1]
    assert sorted(found.parts) == asked and asked
    for number in asked:
        prompt = model.prompts[number]
        check(joined(found.parts[number]), prompt, of_transformers(model, prompt))
    expected = {
        (at, index): list(tokens[:count])
        for at, tokens in enumerate(model.tokens)
        for index in range(SEQUENCES)
    }
    assert found.tokens == expected
