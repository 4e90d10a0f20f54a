"""What copies of KV blocks wait for, and what waits for them. Streams are stand-ins that take notes.

The copies themselves run at once, on the CPU.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ep_server.backends.gpu import kv_copies
from ep_server.backends.gpu.kv_copies import GpuCopies
from ep_server.errors import InternalError
from ep_server.records import KvLoad, KvMoves
from tests.support.triton.harness import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU streams are real: tests/gpu has the test")
BLOCKS, WIDTH, PARTS, SLOTS = 8, 16, 2, 12
NOTES: list[str] = []


class Event:
    def __init__(self, name: str) -> None:
        self.name, self.passed = name, False

    def query(self) -> bool:
        return self.passed


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.events = name, list[Event]()

    def record_event(self) -> Event:
        self.events.append(Event(f"{self.name} {len(self.events)}"))
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        NOTES.append(f"{self.name} waits for {event.name}")


class Cache:
    """Of two layers; each byte of block b is b."""

    def __init__(self) -> None:
        self.tensors = [
            torch.arange(BLOCKS, dtype=torch.uint8).repeat_interleave(WIDTH).view(BLOCKS, WIDTH)
            for _ in range(PARTS)
        ]

    def parts(self) -> list[torch.Tensor]:
        return self.tensors

    def held(self) -> list[int]:
        """The block whose bytes each block has, in all layers."""
        rows = torch.cat(self.tensors, 1)
        assert all(len(set(row.tolist())) == 1 for row in rows)
        return rows[:, 0].tolist()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The stream of the steps, that of the saves and that of the loads."""
    NOTES.clear()
    made = [Stream("steps")]

    def another(*_: object) -> Stream:
        made.append(Stream(("saves", "loads")[len(made) - 1]))
        return made[-1]

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", another)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made[0])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(kv_copies, "STAGING_BYTES", 2 * PARTS * WIDTH)  # two blocks at a time
    return made


def test_blocks_come_back_as_they_were(streams: list[Stream]) -> None:
    cache = Cache()
    copies = GpuCopies(cache, SLOTS, torch.device("cpu"))
    copies.start(KvMoves(saves=((5, 9), (1, 2), (7, 3), (3, 10), (6, 4))))
    for part in cache.tensors:
        part.fill_(99)
    copies.start(
        KvMoves(loads=(KvLoad(1, ((0, 4), (2, 9), (1, 2), (6, 10), (4, 3))),), fresh=tuple(range(8)))
    )
    assert cache.held() == [99] * BLOCKS  # the step is not launched yet
    copies.start_loads()
    assert cache.held() == [6, 1, 5, 99, 7, 99, 3, 99]
    block = PARTS * WIDTH
    assert copies.counters() == {"kv_saved_bytes": 5 * block, "kv_loaded_bytes": 5 * block}


def test_a_load_ends_when_its_event_has_passed(streams: list[Stream]) -> None:
    copies = GpuCopies(Cache(), SLOTS, torch.device("cpu"))
    copies.start(KvMoves(loads=(KvLoad(7, ((0, 1),)),), fresh=(0,)))
    assert copies.loaded() == []  # where no step is run, it has begun now
    streams[2].events[0].passed = True
    assert copies.loaded() == [7]
    assert copies.loaded() == []


def test_steps_wait_only_for_copies_of_blocks_they_may_write(streams: list[Stream]) -> None:
    copies = GpuCopies(Cache(), SLOTS, torch.device("cpu"))
    copies.start(KvMoves(saves=((5, 0), (6, 1)), fresh=(1, 2)))
    assert NOTES == ["saves waits for steps 0"]
    NOTES.clear()
    copies.start(KvMoves(fresh=(3, 6)))
    assert NOTES == ["steps waits for saves 0"]
    NOTES.clear()
    copies.start(KvMoves(loads=(KvLoad(1, ((2, 0),)),), fresh=(2,)))
    assert NOTES == ["loads waits for steps 1", "loads waits for saves 1"]
    NOTES.clear()
    copies.start(KvMoves(fresh=(2,)))  # its sequence was cancelled
    assert NOTES == ["steps waits for loads 0"]
    NOTES.clear()
    streams[1].events[0].passed = streams[2].events[0].passed = True
    copies.start(KvMoves(fresh=(2, 5, 6)))
    assert NOTES == []


def test_a_copy_that_never_ends_is_an_error(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_copies, "STEP_SECONDS", -1.0)
    copies = GpuCopies(Cache(), SLOTS, torch.device("cpu"))
    copies.start(KvMoves(loads=(KvLoad(7, ((0, 1),)),), fresh=(0,)))
    with pytest.raises(InternalError, match="a copy of 1 KV blocks has not ended"):
        copies.loaded()


def test_memory_that_a_stuck_gpu_may_use_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, memory = threading.Event(), torch.zeros(8, dtype=torch.uint8)
    kept = weakref.ref(memory)
    monkeypatch.setattr(kv_copies, "STEP_SECONDS", 0.05)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: released.wait(60))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("unregisters memory in use"))
    try:
        kv_copies.unpin(memory, torch.device("cuda", 1))
        del memory
        gc.collect()
        assert kept() is not None
    finally:
        released.set()
    assert "cuda:1 has not ended its work in 0.05 s" in caplog.text
