"""Weights change in place under a GPU's runner, its kernels interpreted; tests/gpu has the real device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.gpu.updated import assert_updates_in_place
from tests.support.models.checkpoints import Tiny
from tests.support.models.perturbed import perturbed


def test_weights_change_in_place(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    other = perturbed(model.path, tmp_path / "other")
    assert_updates_in_place(model.path, other, [*model.prompts[0][:8], *model.tokens[0][:2]], "float32")
