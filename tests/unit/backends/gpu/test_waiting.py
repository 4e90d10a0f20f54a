"""No wait of the host for a GPU lasts for ever, whoever waits; tests/gpu has a device that is really late."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from ep_server.backends.gpu import waiting
from ep_server.backends.gpu.waiting import Snapshot, await_device, await_event, await_stream
from ep_server.errors import InternalError
from tests.support.gpu.runners import Passed

NEVER = float("inf")


class Stream:
    """It comes to the end of its work at that look."""

    def __init__(self, looks: float) -> None:
        self.event = Passed(looks)

    def record_event(self) -> Passed:
        return self.event


def test_waiting_for_a_stuck_device_ends_with_an_error() -> None:
    await_event(Passed(3), 60)
    with pytest.raises(InternalError, match=r"has not ended a step in 0\.01 s"):
        await_event(Passed(NEVER), 0.01)


def test_nor_is_a_stream() -> None:
    stream = Stream(3)
    await_stream(stream, 60)
    assert stream.event.left == 0
    with pytest.raises(InternalError, match=r"has not ended copies in 0\.01 s"):
        await_stream(Stream(NEVER), 0.01, "copies")


def test_nor_is_a_device_that_a_rank_is_made_ready_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(NEVER))
    with pytest.raises(InternalError, match=r"has not ended a prompt of 8 rows in 0\.01 s"):
        await_device(torch.device("cuda", 0), 0.01, "a prompt of 8 rows")
    await_device(torch.device("cpu"), 0.0)


@pytest.mark.parametrize("looks", [3, NEVER])
def test_nor_are_copies_of_counters(looks: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies themselves are the CPU's here."""
    taken = Snapshot([torch.tensor([5, 6])])
    taken._stream = Stream(looks)  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(waiting, "COPY_SECONDS", 0.01 if looks == NEVER else 60)
    if looks != NEVER:
        assert [copy.tolist() for copy in taken.take()] == [[5, 6]]
        return
    with pytest.raises(InternalError, match=r"has not ended copies of counters in 0\.01 s"):
        taken.take()


def test_looks_leave_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(waiting.time, "sleep", slept.append)
    await_event(Passed(4), 60)
    assert slept == [waiting.LOOK_SECONDS] * 3
