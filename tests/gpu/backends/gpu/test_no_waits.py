"""A step of a GPU is launched without waiting for it, whatever its requests ask for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ep_server.backends.gpu.graphs import GraphKey
from tests.support.gpu.watched import decode, gpu_watch, made_runner

pytestmark = pytest.mark.gpu


def test_no_launch_waits_for_the_device(tmp_path: Path) -> None:
    """Prompts, captured steps, requests that join and leave, every parameter of sampling."""
    runner = made_runner(tmp_path, torch.device("cuda"), (GraphKey(4),))
    decode(runner, 1, nullcontext)  # the first launches compile kernels and choose library ones
    launches, padded = decode(runner, 9, gpu_watch)
    assert 0 < padded < launches


def test_the_watch_sees_a_wait() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), gpu_watch():
        x[0].item()
