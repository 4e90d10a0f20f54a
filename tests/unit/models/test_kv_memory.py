"""Where the system refuses memory for KV caches that outlives processes: caches are their ranks' own then."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from ep_server.models.kv_memory import KvMemory, KvMemoryLayout
from tests.support.kv_memory import kv_memory, new_place

LAYOUT = KvMemoryLayout(blocks=16, parts=2, part_bytes=1 << 12)


def check_nothing_outlives(memory: KvMemory) -> None:
    assert memory.take(0) is None
    memory.leave(0, lost=True)
    assert memory.lost == [] and not memory.forget_lost()
    memory.finish()


def test_nobody_wants_a_place() -> None:
    check_nothing_outlives(KvMemory())


def test_memory_has_no_room_for_a_lost_rank(caplog: pytest.LogCaptureFixture) -> None:
    memory = KvMemory(LAYOUT, 0)
    check_nothing_outlives(memory)
    assert memory.fd is None and caplog.text.count("scheduler.kv_fraction") == 1


def test_memory_has_room_for_one_lost_rank_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    """The second one's is freed at once, and the third's is kept as soon as the first's is not."""
    with kv_memory(LAYOUT, keeps=1) as memory:
        for rank in (0, 1, 2):
            new_place(memory, LAYOUT, rank).set(0, bytes(range(1, 17)))
        memory.leave(0, lost=True)
        memory.leave(1, lost=True)
        assert memory.lost == [0]
        assert caplog.text.count("no memory to keep the KV cache of lost rank 1") == 1
        memory.forget_lost()
        memory.leave(2, lost=True)
        assert memory.lost == [2]
        memory.finish()
        assert [*new_place(memory, LAYOUT, 3).names([0, 1, 2]).values()] == [(2, 0)]


def test_a_system_without_memory_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = KvMemory(LAYOUT, 1)
    check_nothing_outlives(memory)
    assert memory.fd is None
    assert [record.getMessage() for record in caplog.records] == [
        "the system has no memory for KV caches that outlives their ranks: [Errno 24] Too many open files"
    ]


def test_a_limit_is_reached_later(caplog: pytest.LogCaptureFixture) -> None:
    """The rank beyond it gets no place. Those of others stay, and later ones may fit again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with kv_memory(LAYOUT) as memory:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LAYOUT.nbytes * 2 - 1, limits[1]))
            assert memory.take(0) == 0
            assert memory.take(1) is None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "rank 1: no 0.00 GiB for a KV cache that outlives it: [Errno 27]" in caplog.text
        memory.leave(0, lost=True)
        assert memory.lost == [0]
        assert memory.take(0) == 1


def test_memory_is_freed_without_a_free_descriptor(caplog: pytest.LogCaptureFixture) -> None:
    """A server with too many open files must not keep the caches of lost ranks for ever."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with kv_memory(LAYOUT, keeps=1) as memory:
        assert memory.take(0) == 0 and memory.fd is not None
        os.pwrite(memory.fd, b"x" * LAYOUT.nbytes, 0)
        assert os.fstat(memory.fd).st_blocks > 0
        memory.leave(0, lost=True)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            assert memory.forget_lost()
            memory.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert os.fstat(memory.fd).st_blocks == 0 and not caplog.records
