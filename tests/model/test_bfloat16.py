"""BF16 logits are as close to float32 as transformers' own BF16 logits are, with the same routing forced.

Forcing works by answering the router's choices of groups and experts with the float32 oracle's, in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers

from ep_server.model.batch import split
from ep_server.model.decoder import interleave
from ep_server.model.runner import ModelRunner
from ep_server.records import SeqSlice, StepBatch
from tests.harness.checkpoints import CASES, Tiny
from tests.model.driver import BLOCK, alone

PREFILL = 24  # positions run as one chunk; the rest decode one by one


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_logits(tiny: Callable[[str], Tiny], name: str) -> None:
    model = tiny(name)
    ids = [*model.prompts[1], *model.tokens[1]][:64]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    with torch.inference_mode(), recorded_routing() as routing:
        expected = oracle(torch.tensor([ids])).logits[0]
    theirs_model = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.bfloat16)
    with torch.inference_mode(), forced_routing(routing):
        theirs = theirs_model(torch.tensor([ids])).logits[0].float()
    runner, _ = alone(model.path, "bfloat16")
    cuts = [(0, PREFILL), *((i, i + 1) for i in range(PREFILL, len(ids)))]
    forced = [layer[a:b] for a, b in cuts for layer in routing]
    with torch.inference_mode(), forced_routing(forced):
        ours = torch.cat([rows(runner, ids, a, b) for a, b in cuts])
    bound = 1.5 * (theirs - expected).abs().max()
    print(name, float((ours - expected).abs().max()), float(bound) / 1.5)
    assert bound > 0
    assert (ours - expected).abs().max() <= bound


def rows(runner: ModelRunner, ids: list[int], start: int, end: int) -> torch.Tensor:
    """Logits of all positions start .. end, not only of the last."""
    item = SeqSlice(0, start, ids[start:end], list(range(40, 0, -1)), True)
    batch = split(StepBatch((item,), end - start), 1, BLOCK)[0]
    batch = dataclasses.replace(batch, sample_rows=torch.arange(end - start))
    return interleave([runner._decoder.forward(batch)])[0]


@contextmanager
def recorded_routing() -> Iterator[list[torch.Tensor]]:
    """Collects the chosen experts (and groups), [tokens, k] per choice."""
    calls: list[torch.Tensor] = []
    with _patched_topk(calls.append):
        yield calls


@contextmanager
def forced_routing(calls: list[torch.Tensor]) -> Iterator[None]:
    """Answers the choices with these, in turn; all must be used up."""
    left = list(calls)
    with _patched_topk(lambda _: left.pop(0)):
        yield
    assert not left


@contextmanager
def _patched_topk(answer: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    plain = torch.topk

    def topk(x: torch.Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[torch.Tensor, ...]:
        values, ids = plain(x, k, dim=dim, sorted=sorted)
        answered = None if k == x.shape[-1] else answer(ids)  # to take all is no choice
        if answered is None:
            return torch.return_types.topk((values, ids))
        assert answered.shape == ids.shape
        return torch.return_types.topk((x.gather(-1, answered), answered))

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = plain
