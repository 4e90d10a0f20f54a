"""abort() while a wait of the same rank fails: the group is told one cause, and the same one everywhere."""

from __future__ import annotations

import os
import queue
import threading
import time

import pytest
import torch

from ep_server.errors import GroupAborted, PeerTimeout
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.host import open_shm
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import Waiting

RANKS, TIMEOUT_NS, STATUS_BYTES = 64, 20_000_000, 28
TRIALS = 40


def causes(spec: ExchangeSpec, offset_ns: int) -> set[bytes]:
    """The statuses that the regions of 64 ranks hold, of which only rank 0 runs."""
    fd = create_segment(spec)
    exchange = open_shm(spec, fd, Waiting(TIMEOUT_NS // 1000))
    layout = exchange.layout
    begin = next(begin for what, begin, _ in layout.regions() if what == "abort_status[0]")
    x, ids = torch.zeros(1, spec.hidden, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    pending = exchange.dispatch_send(x, ids, torch.ones(1, 1))
    began: queue.SimpleQueue[int] = queue.SimpleQueue()

    def abort() -> None:
        at = began.get() + TIMEOUT_NS + offset_ns
        while time.monotonic_ns() < at:
            pass
        exchange.group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    began.put(time.monotonic_ns())
    with pytest.raises((PeerTimeout, GroupAborted)):
        pending.recv()
    thread.join()
    found = {os.pread(fd, STATUS_BYTES, layout.region(rank) + begin) for rank in range(RANKS)}
    exchange.close()
    os.close(fd)
    return found


def test_failing_wait_and_abort_do_not_overwrite_each_other() -> None:
    spec = ExchangeSpec(0, RANKS, tuple(range(RANKS)), 1, 8, 1, timeout_ns=TIMEOUT_NS)
    seen: set[bytes] = set()
    for trial in range(TRIALS):
        found = causes(spec, trial % 20 * 10_000)
        assert len(found) == 1, f"trial {trial}: the ranks were told {len(found)} causes"
        seen |= found
    assert len(seen) in {1, 2}
