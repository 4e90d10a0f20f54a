from __future__ import annotations

import pytest
import torch
from transformers.utils import logging

from tests.harness.checkpoints import CASES, Tiny, make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random qwen3_moe checkpoint and what transformers answers to its prompts in float32."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return make(CASES[0], tmp_path_factory.mktemp("qwen3_moe"))
