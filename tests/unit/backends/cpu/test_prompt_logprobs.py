"""Log probabilities of prompts on a CPU rank are those of transformers, however the prompt is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ep_server.models import prompt_scorer
from tests.support.models.checkpoints import Tiny
from tests.support.models.driver import alone
from tests.support.models.prompt_scores import CASES, check_all, scored


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_prompts_are_scored_once(
    tiny: Callable[[str], Tiny], name: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of chunks, and of one request that is preempted and computed again."""
    monkeypatch.setattr(prompt_scorer, "MOST_ROWS", 3)
    model, count = tiny(name), 24
    found = scored(alone(model.path)[0], model, count, kv_blocks=16, micro_batches=micro_batches)
    assert found.preemptions
    check_all(found, model, count)
