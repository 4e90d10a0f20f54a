"""Weights of every family change in place on a GPU, under captured graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu.updated import assert_updates_in_place
from tests.support.models.answers import Answers
from tests.support.models.perturbed import perturbed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_change_in_place(
    answers: dict[str, Answers], family: str, dtype: str, tmp_path: Path
) -> None:
    model = answers[family]
    other = perturbed(model.path, tmp_path / "other")
    assert_updates_in_place(model.path, other, [*model.prompts[0], *model.tokens[0]], dtype)


@pytest.mark.parametrize("name", ["qwen3_moe-fp8", "deepseek_v3-fp8"])
def test_codes_and_scales_change_in_place(fp8_answers: dict[str, Answers], name: str, tmp_path: Path) -> None:
    model = fp8_answers[name]
    other = perturbed(model.path, tmp_path / "other", share=0.2)
    ids = [*model.prompts[0], *model.tokens[0]]
    assert_updates_in_place(model.path, other, ids, "bfloat16")
