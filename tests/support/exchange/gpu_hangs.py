"""What a rank does whose GPU ends no more work. Only an emulated GPU can be made to hang and to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest
import torch.distributed as dist

from ep_server.exchange.api import ExchangeSpec, Payload, View
from ep_server.exchange.nvlink import launch
from tests.support.exchange.conformance import run_pair
from tests.support.exchange.gpu_group import close_exchange, open_exchange
from tests.support.exchange.on_gpu import OnGpu

SECONDS = 0.05


class Hangs(Protocol):
    """emulated.hangs() of this process's GPU."""

    def __call__(self, *, now: bool) -> None: ...


def outlived(group: dist.ProcessGroup, hangs: Hangs) -> None:
    """Waits for its GPU end with an error that says for what. If it goes on, so does the exchange."""
    launch.IDLE_SECONDS = SECONDS
    spec = ExchangeSpec(group.rank(), 1, (0,) * 4, 4, 640, 2, Payload.BF16, num_banks=2, timeout_ns=1_000_000)
    exchange = open_exchange(group, spec)
    run_pair(OnGpu(exchange), "max_tokens", 0, View.PADDED)
    device = exchange._open().group
    device.set_delay(0)
    copied_in, copied_out = "a copy to the state of the exchange", "a copy of the state of the exchange"
    waits: list[tuple[str, Callable[[], object]]] = [
        (copied_out, exchange.statistics),
        (copied_out, lambda: exchange.masked),
        (copied_out, device.clocks_ahead),
        (copied_in, lambda: exchange.mask([0])),
        (copied_in, lambda: exchange.set_faults([])),
        (copied_in, device.abort),
        ("emptying the cells of clocks", device.empty_clock_cells),
    ]
    hangs(now=True)
    for what, wait in waits:
        with pytest.raises(RuntimeError, match=rf"^{what} has not ended on the GPU in 0\.05 s$"):
            wait()
    hangs(now=False)
    exchange.reset()
    run_pair(OnGpu(exchange), "max_tokens", 1, View.PADDED)
    assert exchange.masked == frozenset()
    close_exchange(exchange)


def dropped(group: dist.ProcessGroup, hangs: Hangs) -> None:
    """An exchange that nobody closed is dropped beside a GPU that hangs; its memory stays."""
    launch.IDLE_SECONDS = SECONDS
    spec = ExchangeSpec(group.rank(), 1, (0,) * 4, 4, 640, 2, Payload.BF16, num_banks=2, timeout_ns=1_000_000)
    exchange = open_exchange(group, spec)
    run_pair(OnGpu(exchange), "max_tokens", 0, View.PADDED)
    hangs(now=True)
    del exchange
    hangs(now=False)
