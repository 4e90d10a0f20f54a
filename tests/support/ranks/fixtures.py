"""How most tests of rank processes start them, and the checkpoints that they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.models.checkpoints import CASES, Tiny
from tests.support.models.fixtures import checkpoint, fp8_checkpoint
from tests.support.models.fp8 import GQA, Fp8Tiny
from tests.support.ranks.zygote import forking


@pytest.fixture(scope="package", autouse=True)
def ranks_are_forks() -> Iterator[None]:
    """A rank's imports take longer than most of these tests. Tests elsewhere start ranks as a server does."""
    with forking():
        yield


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    """A random qwen3_moe checkpoint and what transformers answers to its prompts in float32."""
    torch.set_num_threads(1)
    return checkpoint(CASES[0])


@pytest.fixture(scope="session")
def fp8_tiny() -> Fp8Tiny:
    """A random qwen3_moe checkpoint of FP8 weights, and transformers' answers for their values."""
    torch.set_num_threads(1)
    return fp8_checkpoint(GQA)
