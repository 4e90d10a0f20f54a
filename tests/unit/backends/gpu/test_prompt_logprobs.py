"""Log probabilities of prompts on a GPU rank are those of transformers, beside captured steps.

Without a GPU its kernels are interpreted. Where there is a GPU the same runs on it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.moe.rows import LocalRows
from ep_server.models import prompt_scorer
from tests.support.gpu.runners import gpu_runner
from tests.support.models.checkpoints import Tiny
from tests.support.models.prompt_scores import check_all, scored


@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prompts_are_scored_a_step_ahead(
    tiny: Callable[[str], Tiny], micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of single tokens, and chunks of prompts that are not scored, are captured."""
    monkeypatch.setattr(prompt_scorer, "MOST_ROWS", 3)
    model, count = tiny("qwen3_moe"), 3
    runner = gpu_runner(model.path, (GraphKey(4), GraphKey(20)), rows=LocalRows())
    with torch.inference_mode():
        runner.graphs.capture()
    found = scored(runner, model, count, kv_blocks=64, ahead=1, micro_batches=micro_batches)
    check_all(found, model, count)
