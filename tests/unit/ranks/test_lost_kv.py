"""Copies from lost ranks in pieces, between the steps of a rank. The memory is real."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
import torch

from ep_server.backends.cpu.shared_kv import SharedKv
from ep_server.models.kv_memory import NAME_BYTES, KvMemory, KvMemoryLayout
from ep_server.ranks import lost_kv
from ep_server.ranks.lost_kv import LostKv
from ep_server.scheduler.lost_blocks import LostBlocks
from tests.support.kv_memory import kv_memory, new_place

LAYOUT = KvMemoryLayout(blocks=16, parts=2, part_bytes=64)
NAMES = [bytes([block + 1]) * NAME_BYTES for block in range(16)]


@pytest.fixture
def memory() -> Iterator[KvMemory]:
    with kv_memory(LAYOUT) as made:
        yield made


def parts_of(kv: SharedKv) -> list[torch.Tensor]:
    return [kv.zeros((16, 64), torch.uint8, torch.device("cpu")) for _ in range(2)]


def taking_over(
    memory: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> tuple[LostBlocks, LostKv, list[torch.Tensor]]:
    """A rank beside a lost one, whose blocks hold their numbers. Two blocks are copied at a time."""
    monkeypatch.setattr(lost_kv, "PIECE", 2)
    monkeypatch.setattr(lost_kv, "TURN_SECONDS", 0.0)
    other = new_place(memory, LAYOUT, 0)
    for part in parts_of(other):
        part[:] = torch.arange(16, dtype=torch.uint8)[:, None]
    for block, name in enumerate(NAMES):
        other.set(block, name)
    memory.leave(0, lost=True)
    own, blocks = new_place(memory, LAYOUT, 1), LostBlocks()
    made = LostKv(blocks, own, block_size=4)
    made.offer(memory.lost)
    return blocks, made, parts_of(own)


def test_a_turn_copies_a_piece_at_least(memory: KvMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, made, parts = taking_over(memory, monkeypatch)
    first = blocks.copy([9, 8, 7, 6, 5], blocks.find(NAMES[:5]))
    second = blocks.copy([0], blocks.find(NAMES[7:8]))
    assert [made.before_plan() for _ in range(5)] == [[], [], [first], [second], []]
    assert blocks.take_arrived(first) == 5 and blocks.take_arrived(second) == 1
    for part in parts:
        assert part[:10, 0].tolist() == [7, 0, 0, 0, 0, 4, 3, 2, 1, 0]
    assert made.take_copied() == 24 and made.take_copied() == 0
    assert made.counters() == {"kv_lost_tokens": 24}


def test_memory_that_is_freed_between_pieces(memory: KvMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, made, _ = taking_over(memory, monkeypatch)
    ticket = blocks.copy([1, 2, 3], blocks.find(NAMES[:3]))
    assert made.before_plan() == []
    memory.forget_lost()
    memory.finish()
    made.forget()
    assert not blocks and not blocks.find(NAMES)
    assert made.before_plan() == [ticket] and blocks.take_arrived(ticket) == 2


def test_a_dropped_copy_ends_between_pieces(memory: KvMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one begins with its own first block."""
    blocks, made, parts = taking_over(memory, monkeypatch)
    ticket = blocks.copy([1, 2, 3], blocks.find(NAMES[:3]))
    assert made.before_plan() == []
    blocks.drop(ticket)
    following = blocks.copy([4, 5], blocks.find(NAMES[10:12]))
    assert made.before_plan() == [following] and blocks.take_arrived(following) == 2
    assert parts[1][:6, 0].tolist() == [0, 0, 1, 0, 10, 11]


def test_memory_that_cannot_be_read_is_computed_again(
    memory: KvMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a page that the hardware has lost."""
    blocks, made, _ = taking_over(memory, monkeypatch)
    ticket = blocks.copy([1, 2, 3], blocks.find(NAMES[:3]))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "read error")

    monkeypatch.setattr(os, "preadv", fail)
    assert made.before_plan() == [ticket] and blocks.take_arrived(ticket) == 0
    monkeypatch.setattr(os, "pread", fail)
    made.offer(memory.lost)
    assert not blocks
    assert caplog.text.count("cannot be read") == 2


def test_nothing_outlives_a_rank_without_this_memory() -> None:
    blocks = LostBlocks()
    made = LostKv(blocks, None, 4)
    made.offer([3])
    made.forget()
    assert made.before_plan() == [] and blocks.names is None and not blocks
