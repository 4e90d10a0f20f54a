"""Counters are read while the device is at work."""

from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.waiting import Snapshot
from ep_server.errors import InternalError
from ep_server.exchange.device_wait import await_current

pytestmark = pytest.mark.gpu


def test_a_snapshot_does_not_wait_for_the_steps_in_flight() -> None:
    """Neither its first one nor a later one; once they have ended it has what they left."""
    counters = [torch.zeros(3, dtype=torch.int64, device="cuda"), torch.zeros((), device="cuda")]
    snapshot = Snapshot(counters)
    for counter in counters:
        counter.add_(0)  # a kernel's first launch may wait for the device
    torch.cuda.synchronize()
    for round_ in (1, 2):
        torch.cuda._sleep(2_000_000_000)  # cycles: more than half a second
        ended = torch.cuda.Event()
        for counter in counters:
            counter.add_(1)
        ended.record()
        before = [copy.tolist() for copy in snapshot.take()]
        assert not ended.query()
        assert before == [[round_ - 1] * 3, float(round_ - 1)]
        ended.synchronize()
        assert [copy.tolist() for copy in snapshot.take()] == [[round_] * 3, float(round_)]


def test_a_device_is_waited_for_until_a_deadline() -> None:
    """Then it is told what has not ended, and the next wait has it."""
    device = torch.device("cuda")
    await_current(device, 60, "a sleep")
    torch.cuda._sleep(1_000_000_000)
    with pytest.raises(InternalError, match=r"has not ended a sleep in 0\.01 s"):
        await_current(device, 0.01, "a sleep")
    ended = torch.cuda.current_stream().record_event()
    await_current(device, 60, "a sleep")
    assert ended.query()
