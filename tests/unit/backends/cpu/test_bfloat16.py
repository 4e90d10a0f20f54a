"""BF16 logits of the CPU engine keep the rule of harness/bfloat16.py, for every family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from ep_server.backends.cpu.runner import ModelRunner
from ep_server.models.batch import split
from ep_server.models.decoder import interleave
from ep_server.records import SeqSlice, StepBatch
from tests.support.models.bfloat16 import Rounding, forced_routing
from tests.support.models.checkpoints import CASES, Tiny
from tests.support.models.driver import BLOCK, alone

PREFILL = 24  # positions run as one chunk; the rest decode one by one


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_logits(tiny: Callable[[str], Tiny], name: str) -> None:
    model = tiny(name)
    rule = Rounding.of(model.path, [*model.prompts[1], *model.tokens[1]][:64])
    runner, _ = alone(model.path, "bfloat16")
    cuts = [(0, PREFILL), *((i, i + 1) for i in range(PREFILL, len(rule.ids)))]
    with torch.inference_mode(), forced_routing(rule.routing_of(cuts)):
        ours = torch.cat([rows(runner, rule.ids, a, b) for a, b in cuts])
    assert 0 < (ours - rule.expected).abs().max() <= rule.bound


def rows(runner: ModelRunner, ids: list[int], start: int, end: int) -> torch.Tensor:
    """Logits of all positions start .. end, not only of the last."""
    item = SeqSlice(0, start, ids[start:end], list(range(40, 0, -1)), True)
    batch = split(StepBatch((item,), end - start), 1, BLOCK)[0]
    batch = dataclasses.replace(batch, sample_rows=torch.arange(end - start))
    return interleave([runner._decoder.forward(batch)])[0]
