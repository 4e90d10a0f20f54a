"""BF16 logits of the step of a GPU keep the rule of harness/bfloat16.py, as those of the CPU engine do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.gpu.whole_steps import assert_keeps_the_rule
from tests.support.models.bfloat16 import Rounding
from tests.support.models.checkpoints import CASES, Tiny

LENGTH = 16
PIECES = ((0, 7), (7, 12), *((i, i + 1) for i in range(12, LENGTH)))  # a prompt in two chunks, then tokens
NAMES = [pytest.param(c.name, marks=[pytest.mark.slow] * (c.name != "qwen3_moe")) for c in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_as_near_as_those_of_transformers(tiny: Callable[[str], Tiny], name: str) -> None:
    model = tiny(name)
    rule = Rounding.of(model.path, [*model.prompts[1], *model.tokens[1]][:LENGTH])
    assert_keeps_the_rule(model.path, rule, PIECES)
