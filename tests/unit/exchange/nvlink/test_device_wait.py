"""A GPU that does not end its work, or fails, as the driver would tell torch."""

from __future__ import annotations

import threading

import pytest
import torch

from ep_server.errors import InternalError
from ep_server.exchange.nvlink.device_wait import await_idle

GPU = torch.device("cuda", 1)


def test_a_gpu_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ended.wait(60))
    try:
        with pytest.raises(InternalError, match=r"cuda:1 has not ended its work in 0\.05 s"):
            await_idle(GPU, 0.05)
    finally:
        ended.set()


def test_an_error_of_the_gpu_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await_idle(GPU, 60)


def test_work_that_ends_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    await_idle(GPU, 60)
    assert seen == [GPU]
