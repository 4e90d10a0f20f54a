"""A holder and a fetcher of KV rows in one process, on small caches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ep_server.backends.kv_rows import CpuRows
from ep_server.config import HandoffConfig
from ep_server.models.kv_cache import LayerProgress
from ep_server.ranks.handoff.exporter import KvExporter
from ep_server.ranks.handoff.importer import KvImporter
from ep_server.ranks.handoff.lanes import Lanes
from ep_server.scheduler.handoffs import KvFetch
from tests.support.fabric.fabric_ends import loopback, needs

KEY, WAIT = bytes(range(16)), 60.0
PARTS, WIDTH = 3, 40


class Cache:
    """Parts of [blocks, bytes]; a token has WIDTH bytes in each."""

    def __init__(self, blocks: int, block_size: int, fill: int | None = None) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.layers, self.progress = range(PARTS), LayerProgress()
        made = torch.Generator().manual_seed(blocks)
        shape = (blocks, block_size * WIDTH)
        self.tensors = [
            torch.randint(256, shape, dtype=torch.uint8, generator=made)
            if fill is None
            else torch.full(shape, fill, dtype=torch.uint8)
            for _ in range(PARTS)
        ]

    def parts(self) -> list[torch.Tensor]:
        return self.tensors

    def rows(self, blocks: tuple[int, ...]) -> torch.Tensor:
        """[tokens of these blocks, PARTS * WIDTH]"""
        return torch.cat([part[list(blocks)].view(-1, WIDTH) for part in self.tensors], 1)


def rows_of(cache: Cache) -> CpuRows:
    return CpuRows(cache)  # type: ignore[arg-type]


def exporter_of(
    cache: Cache,
    lanes: Lanes | None = None,
    *,
    port: int = 0,
    hold: float = 60,
    stall: float = 5,
    beside: bool = False,
) -> KvExporter:
    """Of a rank that has this cache."""
    config = HandoffConfig(hold_seconds=hold, stall_seconds=stall)
    return KvExporter(rows_of(cache), config, port, lanes, beside=beside)


def lanes(**options: Any) -> Lanes:
    """Over the loopback; skips the test where there is no libfabric."""
    needs("system")
    return Lanes(loopback(**options))


@pytest.fixture
def there() -> Iterator[tuple[Cache, KvExporter]]:
    cache = Cache(40, 5)
    exporter = exporter_of(cache)
    yield cache, exporter
    exporter.close()


def fetched(importer: KvImporter, fetch: KvFetch) -> int:
    """Tokens that arrived."""
    importer.start([fetch])
    end = time.monotonic() + WAIT
    while not (ended := importer.ended()):
        assert time.monotonic() < end
        importer.wait(0.1)
    ((ticket, tokens),) = ended
    assert ticket == fetch.ticket
    return tokens
