"""Memory for KV caches that outlives processes, as the server makes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ep_server.backends.cpu.shared_kv import SharedKv
from ep_server.models.kv_memory import KvMemory, KvMemoryLayout


@contextmanager
def kv_memory(layout: KvMemoryLayout, keeps: int = 8) -> Iterator[KvMemory]:
    """Closed at the end."""
    made = KvMemory(layout, keeps)
    try:
        yield made
    finally:
        made.finish()
        assert made.fd is not None
        os.close(made.fd)


def new_place(memory: KvMemory, layout: KvMemoryLayout, rank: int) -> SharedKv:
    """As a process that becomes a rank maps it."""
    place = memory.take(rank)
    assert memory.fd is not None and place is not None
    return SharedKv(layout, memory.fd, place)
