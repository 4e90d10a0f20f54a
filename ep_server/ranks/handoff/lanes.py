"""Slots for rows that one host writes into another one's memory, over libfabric. Units: bytes, seconds."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable

import torch

from ep_server import _C
from ep_server.backends.kv_rows import HOST_SLOT_BYTES, Kind
from ep_server.errors import StartupError
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.ranks.handoff.wire import SLOTS, HandoffError, Line

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1  # between two looks at a holder that may be gone
_ADDRESS = struct.Struct("<HQQQ")


class LaneSlots:
    """One end of SLOTS slots of at most `rows` rows; what the holder writes keeps its place."""

    kind, descriptor = Kind.FABRIC, -1

    def __init__(self, options: _C.FabricOptions, rows: int, row_bytes: int) -> None:
        """Raises: StartupError."""
        self.rows = max(1, min(HOST_SLOT_BYTES // row_bytes, rows))
        self._slot_bytes = self.rows * row_bytes
        self._lane = _C.FabricLane(options, SLOTS * self._slot_bytes)
        self._memory = torch.frombuffer(self._lane, dtype=torch.uint8)
        self.description = self._lane.description

    def tensor(self, slot: int, size: int) -> torch.Tensor:
        """The first bytes of a slot: [size] uint8."""
        begin = slot * self._slot_bytes
        return self._memory[begin : begin + size]

    def meet(self, line: Line) -> None:
        """Exchanges addresses with the other end. Raises: HandoffError."""
        name, base, key, size, *_ = self._lane.address
        line.put(_ADDRESS.pack(len(name), base, key, size) + name)
        length, *target = _ADDRESS.unpack(line.take(_ADDRESS.size))
        if length != len(name):
            raise HandoffError("the other server's libfabric has addresses of another kind")
        peer = line.take(length)
        try:
            self._lane.connect((peer, *target, 0, 0, 0))
        except StartupError as error:
            raise HandoffError(str(error)) from error

    def send(self, slot: int, size: int, number: int, seconds: float) -> None:
        """Writes a slot. Raises: HandoffError."""
        try:
            self._lane.write(slot * self._slot_bytes, size, number, int(seconds * 1e9))
        except (StartupError, IndexError) as error:
            raise HandoffError(str(error)) from error

    def receive(self, number: int, seconds: float, check: Callable[[], None]) -> None:
        """Until a write is here. check: raises if it will never be. Raises: HandoffError."""
        end = time.monotonic() + seconds
        try:
            while not self._lane.wait(number, int(LOOK_SECONDS * 1e9)):
                check()
                if time.monotonic() > end:
                    raise HandoffError("announced rows did not arrive")
        except StartupError as error:
            raise HandoffError(str(error)) from error

    def close(self) -> None:
        """The memory is this process's own."""


class Lanes:
    """Makes slots with the settings of one rank."""

    def __init__(self, options: FabricOptions) -> None:
        """Opens an endpoint, once. Raises: StartupError where there is no network, with what is missing."""
        self._options = options.native()
        log.info("hand-offs between hosts: %s", LaneSlots(self._options, 1, 1).description)

    def open(self, rows: int, row_bytes: int) -> LaneSlots:
        """For a fetch of so many rows. Raises: HandoffError."""
        try:
            return LaneSlots(self._options, rows, row_bytes)
        except (StartupError, MemoryError) as error:
            raise HandoffError(str(error)) from error
