"""[7] Rows of a GPU's KV cache, through a buffer on the GPU. See backends.kv_rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ep_server.backends.gpu.kernels.triton.kv_blocks import gather_blocks, scatter_blocks
from ep_server.models.kv_cache import KvCache

STAGING_BYTES = 8 << 20  # of each direction


class GpuRows:
    """As backends.kv_rows.CpuRows. Each direction has a stream and a buffer of its own, used in turn."""

    def __init__(self, cache: KvCache, device: torch.device) -> None:
        self.block_size, self._device = cache.block_size, device
        parts = cache.parts()
        self._parts, self._part_bytes = parts, parts[0].shape[1] // cache.block_size
        self.row_bytes = len(parts) * self._part_bytes
        self._addresses = torch.tensor([part.data_ptr() for part in parts], device=device)
        self._out, self._in = _Direction(device), _Direction(device)

    def mark(self) -> torch.cuda.Event:
        """As KvRows.mark."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def read(self, slots: Sequence[int], out: torch.Tensor) -> None:
        """As KvRows.read. The steps that computed them have ended: their tokens were collected."""
        with self._out.lock, torch.cuda.device(self._device), torch.cuda.stream(self._out.stream):
            for first, count, buffer in self._pieces(len(slots), self._out):
                gather_blocks(self._addresses, self._index(slots[first : first + count]), buffer)
                out[first : first + count].copy_(buffer[:count].view(count, -1))
            self._out.stream.synchronize()

    def write(self, slots: Sequence[int], rows: torch.Tensor, after: Any) -> None:
        """As KvRows.write."""
        with self._in.lock, torch.cuda.device(self._device), torch.cuda.stream(self._in.stream):
            self._in.stream.wait_event(after)
            for first, count, buffer in self._pieces(len(slots), self._in):
                buffer[:count].view(count, -1).copy_(rows[first : first + count])
                scatter_blocks(self._addresses, self._index(slots[first : first + count]), buffer)
            self._in.stream.synchronize()

    def _pieces(self, count: int, direction: _Direction) -> list[tuple[int, int, torch.Tensor]]:
        """(first row, rows, buffer for them) of `count` rows."""
        most = max(1, STAGING_BYTES // self.row_bytes)
        buffer = direction.buffer(most * self.row_bytes).view(most, len(self._parts), self._part_bytes)
        return [(first, min(most, count - first), buffer) for first in range(0, count, most)]

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64).to(self._device)


class _Direction:
    """A stream, and a buffer made when it is first used."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._buffer: torch.Tensor | None = None

    def buffer(self, size: int) -> torch.Tensor:
        """Of at least this size; always the same."""
        if self._buffer is None:
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._buffer
