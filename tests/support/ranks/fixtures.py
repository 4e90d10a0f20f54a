from __future__ import annotations

import pytest
import torch
from transformers.utils import logging

from tests.support.models import fp8
from tests.support.models.checkpoints import CASES, Tiny, make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random qwen3_moe checkpoint and what transformers answers to its prompts in float32."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return make(CASES[0], tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="session")
def fp8_tiny(tmp_path_factory: pytest.TempPathFactory) -> fp8.Fp8Tiny:
    """A random qwen3_moe checkpoint of FP8 weights, and transformers' answers for their values."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return fp8.make(fp8.GQA, tmp_path_factory.mktemp("fp8"))
