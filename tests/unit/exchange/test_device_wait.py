"""Waits for a GPU that does not end its work, or fails. tests/gpu has a device that is really late."""

from __future__ import annotations

import threading

import pytest
import torch

from ep_server.errors import InternalError
from ep_server.exchange import device_wait
from ep_server.exchange.device_wait import await_current, await_event, await_idle, await_stream
from tests.support.gpu.streams import Passed, PassedStream

GPU = torch.device("cuda", 1)
NEVER = float("inf")


def test_waiting_for_a_stuck_event_ends_with_an_error() -> None:
    await_event(Passed(3), 60, "a step")
    with pytest.raises(InternalError, match=r"has not ended a step in 0\.01 s"):
        await_event(Passed(NEVER), 0.01, "a step")


def test_waiting_for_a_stuck_stream_ends_with_an_error() -> None:
    stream = PassedStream(3)
    await_stream(stream, 60, "copies")
    assert stream.event.left == 0
    with pytest.raises(InternalError, match=r"has not ended copies in 0\.01 s"):
        await_stream(PassedStream(NEVER), 0.01, "copies")


def test_waiting_for_a_stuck_current_stream_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: PassedStream(NEVER))
    with pytest.raises(InternalError, match=r"has not ended a prompt of 8 rows in 0\.01 s"):
        await_current(GPU, 0.01, "a prompt of 8 rows")
    await_current(torch.device("cpu"), 0.0, "nothing")


def test_looks_leave_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(device_wait.time, "sleep", slept.append)
    await_event(Passed(4), 60, "a step")
    assert slept == [device_wait.LOOK_SECONDS] * 3


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
