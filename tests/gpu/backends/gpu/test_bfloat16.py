"""BF16 logits of a GPU, of every family, are as near to float32 as those of transformers in bfloat16."""

from __future__ import annotations

import pytest

from tests.support.gpu.whole_steps import assert_keeps_the_rule
from tests.support.models.answers import ROUNDING, Answers
from tests.support.models.bfloat16 import Rounding

pytestmark = pytest.mark.gpu
PREFILL = 24  # positions in chunks; the rest decode one by one
PREFILLS = {"whole": ((0, PREFILL),), "chunked": ((0, 7), (7, 8), (8, PREFILL))}


@pytest.mark.parametrize("prefill", PREFILLS)
def test_logits(answers: dict[str, Answers], family: str, prefill: str) -> None:
    path = answers[family].path
    rule = Rounding.read(path / ROUNDING)
    singles = ((at, at + 1) for at in range(PREFILL, len(rule.ids)))
    assert_keeps_the_rule(path, rule, (*PREFILLS[prefill], *singles))
