"""A step whose combines norm gives the tokens of one whose norms are kernels of their own."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.exchange.emulated.built import SECONDS, module
from tests.support.exchange.process_group import run_group
from tests.support.gpu.emulated_steps import NORMED, PIECES, SUMMED, run_steps
from tests.support.gpu.specialised import GQA, MLA

RANKS = 2
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulation's fibers are switched by x86-64 code"
)


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize(
    "config", [pytest.param(GQA, marks=pytest.mark.slow, id="gqa"), pytest.param(MLA, id="mla")]
)
def test_the_tokens_of_steps_whose_combines_norm(tmp_path: Path, config: dict[str, Any]) -> None:
    """MLA has experts of all tokens beside those that rows travel to, and a dense layer first."""
    given = (module(), config, tmp_path)
    found = run_group(run_steps, RANKS, args=given, timeout=SECONDS)
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    for fused, apart, many in found:
        assert torch.equal(many.logits, apart.logits), "steps of many rows sum otherwise"
        assert {NORMED, SUMMED}.isdisjoint(many.notes)
        for notes, kind in ((fused.notes, NORMED), (apart.notes, SUMMED)):
            assert [each for each in notes if each in (NORMED, SUMMED)] == [kind] * layers * len(PIECES)
            ended = [notes[i + 1] for i, each in enumerate(notes) if each == kind]
            assert set(ended) == {"COMBINE"}, "of another phase"
        assert torch.equal(fused.logits.argmax(1), apart.logits.argmax(1))
        torch.testing.assert_close(fused.logits, apart.logits, rtol=0.02, atol=0.02)
    assert not torch.equal(found[0][0].logits, found[1][0].logits), "two ranks read the same"
