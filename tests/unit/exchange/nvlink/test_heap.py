"""Blocks of a heap: where they lie, and what whoever takes one has to wait for."""

from __future__ import annotations

from random import Random

from ep_server.exchange.nvlink.heap import Heap

UNIT = 256


def heap(size: int, passed: frozenset[str] = frozenset()) -> Heap[str]:
    return Heap(size, UNIT, lambda marker: marker in passed)


def test_blocks_follow_one_another_until_nothing_fits():
    memory = heap(5 * UNIT + 1)
    assert [memory.take(size) for size in (1, UNIT, UNIT + 1)] == [(0, []), (UNIT, []), (2 * UNIT, [])]
    assert memory.fits(UNIT) and not memory.fits(UNIT + 1)
    assert memory.take(2 * UNIT) is None
    assert memory.take(0) == (4 * UNIT, [])
    assert memory.take(0) is None


def test_a_freed_block_is_taken_again_behind_its_marker():
    memory = heap(4 * UNIT)
    for _ in range(4):
        memory.take(UNIT)
    memory.give(UNIT, "one")
    memory.give(2 * UNIT, "two")
    assert memory.take(3 * UNIT) is None
    offset, markers = memory.take(2 * UNIT) or (None, [])
    assert offset == UNIT and sorted(markers) == ["one", "two"]


def test_markers_that_have_passed_are_forgotten():
    memory = heap(2 * UNIT, frozenset({"old"}))
    for _ in range(100):
        memory.take(UNIT)
        memory.give(0, "old")
    memory.take(UNIT)
    memory.give(0, "new")
    assert memory.take(2 * UNIT) == (0, ["new"])


def test_no_two_blocks_overlap_and_all_memory_returns():
    random, memory, taken = Random(3), heap(64 * UNIT), {}
    for _ in range(2000):
        if taken and random.random() < 0.5:
            offset = random.choice(sorted(taken))
            del taken[offset]
            memory.give(offset)
            continue
        size = random.randint(1, 9 * UNIT)
        found = memory.take(size)
        if found is None:
            continue
        offset = found[0]
        assert all(offset + size <= other or other + length <= offset for other, length in taken.items())
        taken[offset] = size
    for offset in taken:
        memory.give(offset)
    assert memory.take(64 * UNIT) == (0, [])
