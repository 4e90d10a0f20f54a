"""[7] Rows of a GPU's KV cache. Between GPUs of one host they stay on the device: the fetching GPU reads the
slots of the other one over NVLink. See backends.kv_rows.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from functools import cached_property

import torch

from ep_server.backends.gpu.capability import native_built
from ep_server.backends.gpu.kernels.triton.kv_blocks import gather_blocks, scatter_blocks
from ep_server.backends.gpu.waiting import STEP_SECONDS
from ep_server.backends.kv_rows import HostMemory, HostSlots, Kind
from ep_server.exchange.device_wait import IDLE_SECONDS, Event, await_current, await_event, await_stream
from ep_server.models.kv_cache import KvCache

log = logging.getLogger(__name__)

DEVICE_SLOT_BYTES = 32 << 20  # long beside the wait for a kernel and two messages
MOST_OFFERS = 8  # of device memory at once; more go through host memory


class DeviceSlots:
    """On a GPU, whose memory other processes of the host can map."""

    kind = Kind.DEVICE

    def __init__(self, device: int, rows: int, count: int, row_bytes: int, descriptor: int = -1) -> None:
        """As HostSlots. Raises: RuntimeError where GPUs cannot reach each other."""
        from ep_server import _cuda

        self.rows = max(1, min(DEVICE_SLOT_BYTES // row_bytes, rows))
        self._slot_bytes, size = self.rows * row_bytes, count * self.rows * row_bytes
        if descriptor < 0:
            self._memory = _cuda.PeerMemory(device, size, IDLE_SECONDS)
            self.descriptor = self._memory.export_fd()
        else:
            self._memory = _cuda.PeerMemory.attach(device, size, descriptor)
            self.descriptor = descriptor

    def address(self, slot: int) -> int:
        """Where a slot begins, for kernels of this process's GPU."""
        return self._memory.address + slot * self._slot_bytes

    def close(self) -> None:
        """As Slots.close."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class GpuRows:
    """As backends.kv_rows.CpuRows. Each direction has a stream and a buffer of its own, used in turn.

    Rows leave on a stream of high priority: a few small kernels beside those of a prefill.

    Args:
        patience: seconds for which steps may wait for ranks that are lost.
    """

    def __init__(self, cache: KvCache, device: torch.device, patience: float = 0.0) -> None:
        self.block_size, self._device = cache.block_size, device
        self._step_seconds = STEP_SECONDS + patience
        parts = cache.parts()
        self._parts, self._part_bytes = parts, parts[0].shape[1] // cache.block_size
        self.parts, self.row_bytes = len(parts), len(parts) * self._part_bytes
        self._addresses = torch.tensor([part.data_ptr() for part in parts], device=device)
        self._progress, self._of_layer = cache.progress, self.parts // len(cache.layers)
        self._out, self._in = _Direction(device, priority=-1), _Direction(device)
        self._offers = threading.BoundedSemaphore(MOST_OFFERS)
        self.kind = Kind.DEVICE if device.type == "cuda" and native_built() else Kind.SHARED

    def warm_up(self) -> None:
        """Compiles the kernels, by moving a row onto itself, before anyone uses the cache."""
        await_current(self._device, STEP_SECONDS, "the first values of the KV cache")
        slots, first = self.offer(Kind.PRIVATE, 1, 1), torch.zeros(1, dtype=torch.int64)
        for start in range(min(self.parts, 2)):  # addresses that begin at an odd one are another kernel
            self.read(first, slice(start, None), slots, 0)
            self.write(first, slice(start, None), slots, 0, self.mark())

    def plan_step(self) -> int:
        """As KvRows.plan_step."""
        return self._progress.plan_step()

    def written(self, step: int) -> int:
        """As KvRows.written."""
        return self._progress.layers_of(step) * self._of_layer

    def mark(self) -> torch.cuda.Event:
        """As KvRows.mark."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def offer(self, kind: Kind, rows: int, count: int) -> HostSlots | DeviceSlots:
        """As KvRows.offer."""
        if kind is Kind.DEVICE and self.kind is Kind.DEVICE and self._offers.acquire(blocking=False):
            try:
                slots = DeviceSlots(self._device.index, rows, count, self.row_bytes)
            except RuntimeError as error:
                log.warning("hand-offs go through host memory: %s", error)
                self.kind = Kind.SHARED
            else:
                weakref.finalize(slots, self._offers.release)
                return slots
        return HostSlots(min(kind, Kind.SHARED), rows, count, self.row_bytes)

    def attach(self, kind: Kind, rows: int, count: int, descriptor: int) -> HostSlots | DeviceSlots:
        """As KvRows.attach. Where GPUs cannot reach each other, rows go through host memory."""
        if kind is not Kind.DEVICE:
            return HostSlots(kind, rows, count, self.row_bytes, descriptor)
        try:
            return DeviceSlots(self._device.index, rows, count, self.row_bytes, descriptor)
        except RuntimeError:
            self.kind = Kind.SHARED
            raise

    def read(self, places: torch.Tensor, parts: slice, slots: HostMemory | DeviceSlots, slot: int) -> None:
        """As KvRows.read. The kernels that computed them have ended: the host saw their count, or tokens."""
        with self._out.lock, torch.cuda.device(self._device), torch.cuda.stream(self._out.stream):
            addresses, index = self._addresses[parts], places.to(self._device)
            for first, buffer in self._pieces(len(places), len(addresses), self._out):
                gather_blocks(addresses, index[first : first + len(buffer)], buffer)
                at = first * buffer[0].numel()
                if isinstance(slots, DeviceSlots):
                    self._move(slots.address(slot) + at, buffer, gather=False)
                else:
                    self._out.await_copies()  # a copy to the host would wait for them without a deadline
                    slots.tensor(slot, at + buffer.numel())[at:].copy_(buffer.view(-1))
            self._out.await_copies()

    def write(
        self, places: torch.Tensor, parts: slice, slots: HostMemory | DeviceSlots, slot: int, after: Event
    ) -> None:
        """As KvRows.write. The host waits for `after`: a copy from it would do so without a deadline."""
        await_event(after, self._step_seconds, "the steps before a fetch")
        with self._in.lock, torch.cuda.device(self._device), torch.cuda.stream(self._in.stream):
            addresses, index = self._addresses[parts], places.to(self._device)
            for first, buffer in self._pieces(len(places), len(addresses), self._in):
                at = first * buffer[0].numel()
                if isinstance(slots, DeviceSlots):
                    self._move(slots.address(slot) + at, buffer, gather=True)
                else:
                    buffer.view(-1).copy_(slots.tensor(slot, at + buffer.numel())[at:])
                scatter_blocks(addresses, index[first : first + len(buffer)], buffer)
                self._in.await_copies()

    def _move(self, address: int, buffer: torch.Tensor, *, gather: bool) -> None:
        """Copies between a slot, which no tensor names, and the buffer, part by part of each row."""
        flat = buffer.view(-1, 1, self._part_bytes)
        where = torch.full((1,), address, dtype=torch.int64, device=self._device)  # a copy would wait
        each = torch.arange(len(flat), device=self._device)
        (gather_blocks if gather else scatter_blocks)(where, each, flat)

    def _pieces(self, count: int, parts: int, direction: _Direction) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, buffer for the rows from there on: [rows, parts, bytes]) of `count` rows."""
        whole = max(1, DEVICE_SLOT_BYTES // self.row_bytes)
        buffer, most = direction.buffer(whole * self.row_bytes), whole * self.parts // parts
        for first in range(0, count, most):
            rows = min(most, count - first)
            size = rows * parts * self._part_bytes
            yield first, buffer[:size].view(rows, parts, self._part_bytes)


class _Direction:
    """A stream and a buffer, made when they are first used."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.lock = threading.Lock()
        self._device, self._priority = device, priority
        self._buffer: torch.Tensor | None = None

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Beside that of the steps."""
        return torch.cuda.Stream(self._device, self._priority)  # type: ignore[no-untyped-call]

    def await_copies(self) -> None:
        """Until all of them have ended. Raises: InternalError after STEP_SECONDS."""
        await_stream(self.stream, STEP_SECONDS, "copies of KV rows")

    def buffer(self, size: int) -> torch.Tensor:
        """Of this size, which is always the same."""
        if self._buffer is None:
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._buffer
