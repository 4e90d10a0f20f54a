"""An injected delay of the exchange over NVLink, for measurements: as over a slow network, no sender waits.

csrc/exchange/nvlink/delay.hpp says how. Durations in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ep_server import _cuda
from ep_server.errors import ConfigError
from ep_server.exchange.device_wait import await_idle
from ep_server.exchange.nvlink.banks import COMBINE, DISPATCH, RECV, SEND, DeviceHandle
from ep_server.exchange.spec import ExchangeSpec

MAX_DELAY_SECONDS = 1.0
OPS = (DISPATCH, COMBINE)


def check_delay(seconds: float, spec: ExchangeSpec) -> None:
    """Raises ConfigError for a delay outside its range, or one that is no shorter than the deadline."""
    if not 0 <= seconds <= MAX_DELAY_SECONDS:
        raise ConfigError("delay_seconds", seconds, f"0 to {MAX_DELAY_SECONDS}")
    if seconds * 1e9 >= spec.timeout_ns:
        raise ConfigError("delay_seconds", seconds, f"below the deadline of {spec.timeout_ns / 1e9:g} s")


class NvlinkDelay:
    """The delay of one rank's end: rows become visible so long after they were sent.

    set() and compare_clocks() are collective. A reset of the exchange ends the delay until the next set().
    Steps captured before there was a NvlinkDelay never have one.

    Args:
        barrier: of the same ranks' processes.
    """

    def __init__(
        self, group: _cuda.Group, barrier: Callable[[], None], spec: ExchangeSpec, device: torch.device
    ) -> None:
        self._group, self._barrier, self._spec, self._device = group, barrier, spec, device
        self._deferred: list[Callable[[], None]] | None = None

    def set(self, seconds: float) -> None:
        """The delay of what is sent from now on, also by captured steps. Compares the clocks.

        Waits for the GPU; no operation may be running on any rank. 0 = none. Raises: ConfigError.
        """
        check_delay(seconds, self._spec)
        await_idle(self._device)  # what was sent before has the old delay
        self._group.set_delay(round(seconds * 1e9))
        self.compare_clocks()

    def compare_clocks(self) -> list[int]:
        """Measures how far the clock of each rank's GPU is ahead of this one's, ns; 0 for a masked rank.

        Clocks drift apart by microseconds a second, so call it again in the course of a long measurement.
        No operation may be running.
        """
        self._group.empty_clock_cells()
        self._barrier()
        self._group.compare_clocks(self._stream())
        await_idle(self._device)
        self._barrier()
        return self._group.clocks_ahead()

    @contextmanager
    def defer(self) -> Iterator[Callable[[], None]]:
        """Operations enqueued inside do not wait for the delay. The callable does, on the current stream."""
        deferred: list[Callable[[], None]] = []
        before, self._deferred = self._deferred, deferred

        def wait() -> None:
            for each in deferred:
                each()

        try:
            yield wait
        finally:
            self._deferred = before

    def follow(self, op: str, halves: int, handle: DeviceHandle, *, next_reads_ahead: bool = False) -> None:
        """Enqueues what belongs behind the kernel of these halves of an operation."""
        if self._deferred is None or not halves & RECV:
            self._enqueue(op, halves, handle, next_reads_ahead)
            return
        if halves & SEND:
            self._enqueue(op, SEND, handle, False)
        self._deferred.append(lambda: self._enqueue(op, RECV, handle, False))

    def _enqueue(self, op: str, halves: int, handle: DeviceHandle, next_reads_ahead: bool) -> None:
        memory = handle.state.memory.data_ptr()
        self._group.delay(self._stream(), OPS.index(op), halves, next_reads_ahead, memory)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)
