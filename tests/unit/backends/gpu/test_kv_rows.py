"""Rows of a GPU's cache, with the kernels interpreted and without streams. tests/gpu has those of a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

from ep_server.backends.gpu import kv_rows
from ep_server.backends.gpu.kv_rows import DeviceSlots, GpuRows
from ep_server.backends.kv_rows import HostSlots, Kind, places_of
from ep_server.errors import InternalError
from ep_server.models.kv_cache import LayerProgress
from tests.support.gpu.streams import Passed
from tests.support.triton.harness import DEVICE, INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has it with streams")
BLOCKS, SIZE, WIDTH, PARTS, ROWS = 12, 4, 16, 6, 40
IN_A_SLOT = 7  # whole rows


class Cache:
    """Random rows."""

    def __init__(self, seed: int) -> None:
        self.blocks, self.block_size = BLOCKS, SIZE
        self.layers, self.progress = range(PARTS // 2), LayerProgress()
        made, shape = torch.Generator().manual_seed(seed), (BLOCKS, SIZE * WIDTH)
        self.tensors = [torch.randint(256, shape, dtype=torch.uint8, generator=made) for _ in range(PARTS)]

    def parts(self) -> list[torch.Tensor]:
        return self.tensors

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.view(-1, WIDTH)[places] for part in self.tensors], 1)


class Stream:
    """Its work ends at that look: at once, or never."""

    def __init__(self, looks: float = 0) -> None:
        self._looks = looks

    def record_event(self) -> Passed:
        return Passed(self._looks)


class OnHost(DeviceSlots):
    """Addresses of host memory."""

    def __init__(self, rows: int, count: int, row_bytes: int) -> None:
        self.rows, self._slot_bytes = rows, rows * row_bytes
        self._held = torch.zeros(count * self._slot_bytes, dtype=torch.uint8)

    def address(self, slot: int) -> int:
        return self._held.data_ptr() + slot * self._slot_bytes


def streams(monkeypatch: pytest.MonkeyPatch, steps: Stream, copies: Stream) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: steps)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: copies)


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    streams(monkeypatch, Stream(), Stream())
    monkeypatch.setattr(kv_rows, "DEVICE_SLOT_BYTES", IN_A_SLOT * PARTS * WIDTH)


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.DEVICE])
@pytest.mark.parametrize("cuts", [(0, PARTS), (0, 2, 3, PARTS)], ids=["whole", "layers"])
def test_rows_move_between_two_caches(kind: Kind, cuts: tuple[int, ...]) -> None:
    """Few parts of many rows fill a slot as many parts of few rows do."""
    there, here = Cache(1), Cache(2)
    holder, fetcher = GpuRows(there, DEVICE), GpuRows(here, DEVICE)  # type: ignore[arg-type]
    holder.warm_up()
    slots: Any = HostSlots(kind, IN_A_SLOT, 2, PARTS * WIDTH)
    if kind is Kind.DEVICE:
        slots = OnHost(IN_A_SLOT, 2, PARTS * WIDTH)
    tables = (3, 1, 7, 0, 11, 5, 9, 2, 6, 10, 4), (10, 2, 8, 4, 1, 0, 9, 7, 3, 11)
    sources, places = (
        places_of(table, SIZE, first, ROWS) for table, first in zip(tables, (3, 0), strict=True)
    )
    assert sources.tolist() == [tables[0][n // SIZE] * SIZE + n % SIZE for n in range(3, 3 + ROWS)]
    others = torch.tensor(sorted(set(range(BLOCKS * SIZE)) - set(places.tolist())))
    before, sent = here.rows(others), 0
    for begin, end in pairwise(cuts):
        most = IN_A_SLOT * PARTS // (end - begin)
        for at in range(0, ROWS, most):
            rows, parts = slice(at, min(at + most, ROWS)), slice(begin, end)
            holder.read(sources[rows], parts, slots, sent % 2)
            fetcher.write(places[rows], parts, slots, sent % 2, fetcher.mark())
            sent += 1
    assert torch.equal(here.rows(places), there.rows(sources))
    assert torch.equal(here.rows(others), before)


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.DEVICE])
def test_rows_do_not_wait_forever(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """For their copies, and for steps that may wait for a rank that has stopped."""
    monkeypatch.setattr(kv_rows, "STEP_SECONDS", 0.01)
    streams(monkeypatch, Stream(), Stream(float("inf")))
    rows, first = GpuRows(Cache(1), DEVICE), torch.zeros(1, dtype=torch.int64)  # type: ignore[arg-type]
    slots: Any = OnHost(1, 1, PARTS * WIDTH) if kind is Kind.DEVICE else HostSlots(kind, 1, 1, PARTS * WIDTH)
    with pytest.raises(InternalError, match="copies of KV rows"):
        rows.read(first, slice(None), slots, 0)
    with pytest.raises(InternalError, match="copies of KV rows"):
        rows.write(first, slice(None), slots, 0, Passed(0))
    with pytest.raises(InternalError, match="the steps before a fetch"):
        rows.write(first, slice(None), slots, 0, Passed(float("inf")))
