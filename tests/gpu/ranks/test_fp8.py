"""Rank processes on GPUs with FP8 weights, rows and caches: the tokens of the same weights as values.

The answers are far from any tie, and every token chooses all experts.
"""

from __future__ import annotations

import pytest

from tests.support.models.answers import Answers
from tests.support.ranks.gpu_engine import SIZES, drawn

pytestmark = pytest.mark.gpu
FP8_CACHE = {"model__kv_dtype": "fp8_e4m3"}
SETTINGS = {
    "weights": {},
    "rows": {"exchange__payload": "fp8"},
    "rows-pow2": {"exchange__payload": "fp8_pow2"},
    "cache": FP8_CACHE,
    "all": {"exchange__payload": "fp8", **FP8_CACHE},
    "all-in-two": {"exchange__payload": "fp8", "parallel__overlap": "on", **FP8_CACHE},
}


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["qwen3_moe-fp8", "deepseek_v3-fp8"])
async def test_tokens_are_those_of_the_values(
    fp8_answers: dict[str, Answers], name: str, settings: str, ranks: int
) -> None:
    model = fp8_answers[name]
    tokens, _ = await drawn(model, ranks, model__dtype="bfloat16", **SETTINGS[settings])
    assert tokens == dict(enumerate(model.tokens * 2, start=1))
