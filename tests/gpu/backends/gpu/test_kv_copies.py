"""KV blocks go to pinned host memory and come back, beside steps that write other blocks."""

from __future__ import annotations

import time

import pytest
import torch

from ep_server.backends.gpu import kv_copies
from ep_server.backends.gpu.kv_copies import GpuCopies
from ep_server.records import KvLoad, KvMoves

pytestmark = pytest.mark.gpu
BLOCKS, WIDTH, PARTS, SLOTS = 64, 9216, 5, 80
SECONDS = 60.0


class Cache:
    def __init__(self) -> None:
        made = torch.Generator(device="cuda").manual_seed(1)
        self.tensors = [
            torch.randint(256, (BLOCKS, WIDTH), dtype=torch.uint8, device="cuda", generator=made)
            for _ in range(PARTS)
        ]

    def parts(self) -> list[torch.Tensor]:
        return self.tensors


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_copies, "STAGING_BYTES", 6 * PARTS * WIDTH)  # six blocks at a time


def awaited(copies: GpuCopies) -> list[int]:
    deadline, tickets = time.monotonic() + SECONDS, list[int]()
    while not tickets:
        assert time.monotonic() < deadline
        tickets = copies.loaded()
    return tickets


def test_saved_blocks_come_back(small_staging: None) -> None:
    """Saves see what earlier work wrote; later work that may write their blocks waits for them."""
    cache = Cache()
    copies = GpuCopies(cache, SLOTS, torch.device("cuda"))
    expected = [part.clone() + 1 for part in cache.tensors]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for part in cache.tensors:
        part.add_(1)
    saved = [(block, (7 * block) % SLOTS) for block in range(0, BLOCKS, 2)]
    copies.start(KvMoves(saves=tuple(saved), fresh=tuple(range(BLOCKS))))
    for part in cache.tensors:
        part.zero_()
    loads = tuple((block + 1, slot) for block, slot in saved)
    copies.start(KvMoves(loads=(KvLoad(3, loads),), fresh=tuple(range(1, BLOCKS, 2))))
    assert awaited(copies) == [3]
    for part, before in zip(cache.tensors, expected, strict=True):
        assert torch.equal(part[1::2], before[::2])
        assert not part[::2].any()
    assert copies.counters() == dict.fromkeys(("kv_saved_bytes", "kv_loaded_bytes"), 32 * PARTS * WIDTH)


def test_nothing_waits_on_the_host(small_staging: None) -> None:
    copies = GpuCopies(Cache(), SLOTS, torch.device("cuda"))
    copies.start(KvMoves(saves=((0, 0),), loads=(KvLoad(1, ((1, 0),)),), fresh=(1,)))
    assert awaited(copies) == [1]  # first launches may wait
    torch.cuda._sleep(2_000_000_000)  # cycles: more than half a second
    ended = torch.cuda.Event()
    ended.record()
    copies.start(KvMoves(saves=((2, 2),), loads=(KvLoad(2, ((3, 2),)),), fresh=(3,)))
    assert copies.loaded() == []
    assert not ended.query()
    assert awaited(copies) == [2]
    assert ended.query()


def test_pinned_memory_is_pinned() -> None:
    memory = kv_copies.pinned(5000, torch.device("cuda"))
    assert memory.is_pinned() and memory.numel() == 5000
    kv_copies.unpin(memory)
    assert not memory.is_pinned()
