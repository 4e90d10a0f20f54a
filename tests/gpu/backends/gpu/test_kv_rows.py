"""Rows leave a GPU's cache and arrive in another one's, through host memory and from GPU to GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from ep_server.backends.gpu import kv_rows
from ep_server.backends.gpu.kv_rows import DeviceSlots, GpuRows
from ep_server.backends.kv_rows import Kind
from ep_server.models.kv_cache import LayerProgress

pytestmark = pytest.mark.gpu
BLOCKS, SIZE, WIDTH, PARTS, ROWS = 32, 16, 1024, 6, 200


class Cache:
    """Random rows, in blocks of SIZE tokens."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.blocks, self.block_size = BLOCKS, SIZE
        self.layers, self.progress = range(PARTS // 2), LayerProgress()
        made = torch.Generator(device=device).manual_seed(seed)
        shape = (BLOCKS, SIZE * WIDTH)
        self.tensors = [
            torch.randint(256, shape, dtype=torch.uint8, device=device, generator=made) for _ in range(PARTS)
        ]

    def parts(self) -> list[torch.Tensor]:
        return self.tensors

    def rows(self, places: list[int] | torch.Tensor) -> torch.Tensor:
        return torch.cat([part.view(-1, WIDTH)[places] for part in self.tensors], 1).cpu()


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.SHARED, Kind.DEVICE])
def test_rows_move_between_two_caches(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs if there are two; in pieces, in any order, and behind the work launched before."""
    monkeypatch.setattr(kv_rows, "DEVICE_SLOT_BYTES", 70 * PARTS * WIDTH)
    first, last = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
    there, here = Cache(first, 1), Cache(last, 2)
    holder, fetcher = GpuRows(there, first), GpuRows(here, last)  # type: ignore[arg-type]
    assert holder.kind is Kind.DEVICE and holder.row_bytes == PARTS * WIDTH
    offered = holder.offer(kind, ROWS, 2)
    assert offered.kind is kind and isinstance(offered, DeviceSlots) == (kind is Kind.DEVICE)
    attached: Any = offered
    if offered.descriptor >= 0:
        attached = fetcher.attach(kind, ROWS, 2, os.dup(offered.descriptor))
    order = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(3)).tolist()
    sources, places = torch.tensor(order[:ROWS]), torch.tensor(order[-ROWS:])
    before = here.rows(order[:-ROWS])
    with torch.cuda.device(last):
        torch.cuda._sleep(100_000_000)
        for part in here.tensors:  # a step launched before the fetch writes these rows; it must not win
            part.view(-1, WIDTH)[places] = 7
        after = fetcher.mark()
    for at in range(0, ROWS, offered.rows):
        slot, count = at // offered.rows % 2, min(offered.rows, ROWS - at)
        for parts in (slice(0, 2), slice(2, PARTS)):
            holder.read(sources[at : at + count], parts, offered, slot)
            fetcher.write(places[at : at + count], parts, attached, slot, after)
    assert torch.equal(here.rows(places), there.rows(sources))
    assert torch.equal(here.rows(order[:-ROWS]), before)
    offered.close()
