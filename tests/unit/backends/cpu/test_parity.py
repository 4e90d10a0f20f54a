"""float32 greedy tokens equal transformers', for every family, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.models.checkpoints import CASES, MIN_DISTINCT, MIN_MARGIN, NEW_TOKENS, Tiny
from tests.support.models.driver import alone, generate

NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_the_checkpoint_is_a_fair_test(tiny: Callable[[str], Tiny], name: str) -> None:
    model = tiny(name)
    assert model.margin > MIN_MARGIN
    assert model.distinct >= MIN_DISTINCT
    assert all(len(tokens) == NEW_TOKENS for tokens in model.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_one_request_alone(tiny: Callable[[str], Tiny], name: str) -> None:
    model = tiny(name)
    runner, _ = alone(model.path)
    for prompt, tokens in zip(model.prompts, model.tokens, strict=True):
        assert generate(runner, [prompt], NEW_TOKENS) == [tokens]


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param({}, id="batched"),
        pytest.param({"chunk": 5, "budget": 13}, id="chunked"),
        pytest.param({"micro_batches": 2}, id="overlapped"),
        pytest.param({"chunk": 7, "budget": 11, "micro_batches": 2, "seed": 3}, id="chunked-overlapped"),
        pytest.param({"chunk": 3, "micro_batches": 3}, id="three-micro-batches"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_cut_otherwise(tiny: Callable[[str], Tiny], name: str, cut: dict[str, int]) -> None:
    model = tiny(name)
    runner, _ = alone(model.path)
    count = 24
    assert generate(runner, model.prompts, count, **cut) == [tokens[:count] for tokens in model.tokens]
