"""The memory of KV caches that outlives processes: names after a kill at any point, copies, and its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
import torch

from ep_server.backends.cpu.shared_kv import SharedKv
from ep_server.errors import InternalError
from ep_server.models.families import ModelSpec, read_spec
from ep_server.models.kv_cache import KvCache
from ep_server.models.kv_memory import NAME_BYTES, KvMemory, KvMemoryLayout
from ep_server.models.sizes import Dtype, kv_block_bytes
from ep_server.scheduler.kv_blocks import DIGEST_BYTES
from tests.support.forks import context
from tests.support.kv_memory import kv_memory, new_place
from tests.support.models.checkpoints import CASES, Tiny

BLOCKS, BLOCK = 6, 4
LAYOUT = KvMemoryLayout(BLOCKS, parts=3, part_bytes=1 << 12)
OLD, NEW = b"o" * NAME_BYTES, b"n" * NAME_BYTES


@pytest.fixture
def memory() -> Iterator[KvMemory]:
    with kv_memory(LAYOUT) as made:
        yield made


def cache(kv: SharedKv, layout: KvMemoryLayout = LAYOUT) -> list[torch.Tensor]:
    shape = (layout.blocks, layout.part_bytes)
    return [kv.zeros(shape, torch.uint8, torch.device("cpu")) for _ in range(layout.parts)]


def held(memory: KvMemory) -> int:
    """Bytes of memory that the file has."""
    return os.fstat(memory.fd).st_blocks * 512


def test_names_are_as_long_as_digests() -> None:
    assert NAME_BYTES == DIGEST_BYTES


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_cache_takes_all_of_a_place(tiny: Any, name: str) -> None:
    """As the cache in memory of its own, for both kinds of attention."""
    model: Tiny = tiny(name)
    spec = read_spec(str(model.path))
    layout = KvMemoryLayout.of(spec, BLOCKS, BLOCK, Dtype.FLOAT32)
    with kv_memory(layout) as memory:
        copy_between_caches(spec, layout, memory)


def copy_between_caches(spec: ModelSpec, layout: KvMemoryLayout, memory: KvMemory) -> None:
    kv, reader = (new_place(memory, layout, rank) for rank in (0, 1))
    made, plain = (KvCache(spec, BLOCKS, BLOCK, torch.float32, None, make) for make in (kv.zeros, None))
    assert [p.shape for p in made.parts()] == [p.shape for p in plain.parts()]
    assert layout.parts * layout.part_bytes == kv_block_bytes(spec, BLOCK, Dtype.FLOAT32)
    for number, part in enumerate(made.parts()):
        part.fill_(number + 1)
    kv.set(2, NEW)
    mine = KvCache(spec, BLOCKS, BLOCK, torch.float32, None, reader.zeros)
    assert reader.names([0]) == {NEW: (0, 2)}
    assert reader.copy([4], [(0, 2, NEW)]) == 1
    for number, part in enumerate(mine.parts()):
        assert part[4].unique().tolist() == [number + 1] and part[3].unique().tolist() == [0]
    with pytest.raises(InternalError, match="part"):
        reader.zeros((BLOCKS, 1), torch.uint8, torch.device("cpu"))


def fill(descriptor: DupFd, place: int, stops_at: int) -> None:
    """Replaces the content of block 1, as a rank does, and is killed before so many stores of it."""
    kv = SharedKv(LAYOUT, descriptor.detach(), place)
    parts = cache(kv)
    stores: list[Any] = [lambda: kv.clear(1)]
    stores += [lambda part=part, half=half: part[1, half].fill_(2) for part in parts
               for half in (slice(None, 2048), slice(2048, None))]  # fmt: skip
    stores += [lambda: kv.set(1, NEW)]
    for number, store in enumerate(stores):
        if number == stops_at:
            os.kill(os.getpid(), signal.SIGKILL)
        store()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("stops_at", range(9))
def test_a_name_is_never_that_of_other_content(memory: KvMemory, stops_at: int) -> None:
    place, first = 0, new_place(memory, LAYOUT, 0)
    for part in cache(first):
        part[1] = 1
    first.set(1, OLD)
    process = context().Process(target=fill, args=(DupFd(memory.fd), place, stops_at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    other = new_place(memory, LAYOUT, 1)
    mine = cache(other)
    found = other.names([place])
    expected = OLD if stops_at == 0 else NEW if stops_at == 8 else None
    assert found == ({} if expected is None else {expected: (place, 1)})
    if expected is not None:
        assert other.copy([0], [(place, 1, expected)]) == 1
        assert {int(value) for part in mine for value in part[0].unique()} == {1 if expected is OLD else 2}


def test_half_a_name_is_nobodys(memory: KvMemory) -> None:
    owner, reader = (new_place(memory, LAYOUT, rank) for rank in (0, 1))
    owner.set(1, OLD)
    owner.set(1, OLD[:8] + bytes(8))
    assert OLD not in reader.names([0])


def test_clear_all_takes_every_name(memory: KvMemory) -> None:
    owner = new_place(memory, LAYOUT, 0)
    for block in range(BLOCKS):
        owner.set(block, bytes([block + 1]) * NAME_BYTES)
    assert len(owner.names([0])) == BLOCKS
    owner.clear_all()
    assert owner.names([0]) == {}


def test_memory_of_a_lost_rank_is_kept_until_it_is_forgotten(memory: KvMemory) -> None:
    """Another place holds as much as before. A copy that comes too late says so."""
    lost, reader = (new_place(memory, LAYOUT, rank) for rank in (0, 1))
    own = cache(reader)
    own[0].fill_(7)
    before = held(memory)
    for part in cache(lost):
        part.fill_(1)
    lost.set(0, OLD)
    lost.set(1, NEW)
    assert held(memory) >= before + LAYOUT.parts * LAYOUT.pitch
    memory.leave(0, lost=True)
    assert memory.lost == [0] and memory.take(0) == 2
    assert reader.copy([1], [(0, 0, OLD)]) == 1
    assert memory.forget_lost() and not memory.forget_lost()
    memory.finish()
    assert held(memory) <= before + 2 * 4096 * LAYOUT.parts
    assert reader.copy([2, 3], [(0, 0, OLD), (0, 1, NEW)]) == 0
    assert held(memory) <= before + 4 * 4096 * LAYOUT.parts, "a late copy makes no pages in what was freed"
    assert own[0][4:].unique().tolist() == [7]


def test_a_rank_that_leaves_gives_its_memory_back_at_once(memory: KvMemory) -> None:
    for part in cache(new_place(memory, LAYOUT, 0)):
        part.fill_(1)
    assert held(memory) > 0
    memory.leave(0, lost=False)
    memory.leave(0, lost=False)
    memory.finish()
    assert held(memory) == 0 and not memory.lost


def test_a_block_that_is_not_read_whole_is_an_error(
    memory: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is right all the same."""
    lost, reader = (new_place(memory, LAYOUT, rank) for rank in (0, 1))
    cache(reader)
    lost.set(0, OLD)
    monkeypatch.setattr(os, "preadv", lambda *_: LAYOUT.part_bytes - 1)
    with pytest.raises(OSError, match="block 0 of place 0 was not read whole"):
        reader.copy([0], [(0, 0, OLD)])


def test_the_place_of_a_copy_may_be_gone_between_its_pieces(memory: KvMemory) -> None:
    """The names go first: what is copied afterwards is not taken for whole."""
    lost, reader = (new_place(memory, LAYOUT, rank) for rank in (0, 1))
    cache(reader)
    lost.set(0, OLD)
    lost.set(2, NEW)
    lost.clear(2)
    assert reader.copy([0, 1], [(0, 0, OLD), (0, 2, NEW)]) == 1
