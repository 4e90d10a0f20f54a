"""The operations of a NvlinkExchange, as far as the host knows them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.errors import HookNotCalled
from ep_server.exchange.api import Handle, PendingCombine

DISPATCH, COMBINE = "dispatch", "combine"
SEND, RECV, BOTH = 1, 2, 3  # halves; csrc/exchange/nvlink/launch_grid.hpp


@dataclass(slots=True)
class DeviceState:
    """A dispatch on GPUs, as far as the host knows.

    memory: device bytes that csrc calls DeviceHandle. stream: on which they were allocated.
    most: tokens that any rank sends, as far as is known: kernels get blocks for so many.
    rows: of the view, -1 where only the device knows. held: the view is read in place.
    combining: a combine of it was sent and not received; the memory has room for the state of one.
    """

    memory: torch.Tensor
    stream: int
    most: int
    rows: int = -1
    received: bool = False
    held: bool = False
    combining: bool = False


DeviceHandle = Handle[DeviceState]


class Banks:
    """The operation in each bank, as far as the host knows. Replays of a graph are not counted.

    Reports a bank that is taken again unread, before a kernel waits for it in vain.
    """

    def __init__(self, rank: int, num_banks: int) -> None:
        self._rank = rank
        self._banks: dict[str, list[DeviceState | PendingCombine | None]] = {
            op: [None] * num_banks for op in (DISPATCH, COMBINE)
        }
        self._sends = {DISPATCH: 0, COMBINE: 0}

    def check(self, op: str) -> None:
        """Raises HookNotCalled where the next bank was not received or released here."""
        banks = self._banks[op]
        before = banks[self._sends[op] % len(banks)]
        if before is None or torch.cuda.is_current_stream_capturing():
            return
        if not before.received or (isinstance(before, DeviceState) and before.held):
            what = f"{op} takes a bank that was not received or released here"
            raise HookNotCalled(f"rank {self._rank}: {what}")

    def take(self, op: str, operation: DeviceState | PendingCombine | None) -> None:
        """The next bank carries `operation`; None = one that is over."""
        if torch.cuda.is_current_stream_capturing():
            return  # in a graph the kernels watch their banks
        banks = self._banks[op]
        banks[self._sends[op] % len(banks)] = operation
        self._sends[op] += 1
