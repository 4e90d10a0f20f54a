"""Where the system refuses memory for KV caches that outlives processes: caches are their ranks' own then."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from ep_server.models.kv_memory import KvMemory, KvMemoryLayout
from tests.support.kv_memory import kv_memory

LAYOUT = KvMemoryLayout(blocks=16, parts=2, part_bytes=1 << 12)


def check_nothing_outlives(memory: KvMemory) -> None:
    assert memory.take(0) is None
    memory.leave(0, lost=True)
    assert memory.lost == [] and not memory.forget_lost()
    memory.finish()


def test_nobody_wants_a_place() -> None:
    check_nothing_outlives(KvMemory())


def test_a_system_without_memory_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = KvMemory(LAYOUT)
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
        assert "rank 1 gets no 0.00 GiB of memory that outlives it for KV: [Errno 27]" in caplog.text
        memory.leave(0, lost=True)
        assert memory.lost == [0]
        assert memory.take(0) == 1
